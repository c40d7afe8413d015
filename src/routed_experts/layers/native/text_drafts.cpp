// Drafts that are copied from texts (routed_experts/speculation): where the end of a sequence occurred before, and what follows there most often.
//
// A text is `padded`: W other tokens, then its tokens; p counts from the latter. A key is the tag of a context in the high bits and the position of
// its last token in the low bits; keys are sorted, and a context of n tokens that has one has one of each shorter length. Positions from `num_sorted` on
// (of the sequence itself alone) have no key. Products are rounded before they are added: results are those of the searches in Python, to the bit.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <vector>

namespace rex {

constexpr int64_t kMostOccurrences = 16, kMostDrafts = 31, kLongestMatch = 64;

struct DraftRule {
  int64_t min_window, max_window, position_mask, tag_mask;
  double max_factor, min_probability;
  const int64_t* factors;              // [W], of the token so far before the end
  const int64_t* salts;                // [R], by length
  const double* survival;              // [kLongestMatch + 1, kMostDrafts], by length of the match and draft
};

struct DraftText {
  const int64_t* keys;
  int64_t num_keys;
  const int32_t* padded;
  const int64_t* positions;  // that have a context, increasing
  int64_t num_positions;
  int64_t num_sorted;        // -1: another text, which a negative token ends
  int64_t most_occurrences;  // the latest ones
  int64_t is_capped;         // the drafts are at most max_factor times as many as the matching tokens
};

struct DraftResult {  // length 0: no match; `position`: the latest one that is copied
  int64_t length, position, count;
  double expected;  // the sum of `survival`
  double survival[kMostDrafts];
  int32_t tokens[kMostDrafts];
};

class DraftSearch {
 public:
  DraftSearch(const DraftRule& rule, const int32_t* padded, int64_t size) : rule_(rule), end_(padded + rule.max_window + size), size_(size) {
    int64_t length = 0;
    for (uint64_t sum = 0; length < rule.max_window; length++) {
      sum += uint64_t(int64_t(end_[-1 - length])) * uint64_t(rule.factors[length]);
      if (length + 1 >= rule.min_window) tags_[length + 1 - rule.min_window] = int64_t(sum + uint64_t(rule.salts[length + 1 - rule.min_window])) & rule.tag_mask;
    }
  }

  void draft(const DraftText& text, int64_t most, DraftResult& result) {
    text_ = text.padded + rule_.max_window;
    find_sorted(text);
    if (text.num_sorted >= 0) find_unsorted(text);
    result.length = length_;
    result.count = 0;
    result.expected = 0.0;
    if (text.is_capped) most = std::min(most, int64_t(rule_.max_factor * double(length_)));
    if (length_ > 0 && most > 0) follow(text.num_sorted < 0, std::min(most, kMostDrafts), result);
  }

 private:
  // How many tokens up to `position` of the text equal the last ones of the sequence; at most W.
  int64_t common_length(int64_t position) const {
    int64_t length = 0;
    while (length < rule_.max_window && text_[position - length] == end_[-1 - length]) length++;
    return length;
  }

  // Occurrences are stored the latest first.
  void find_sorted(const DraftText& text) {
    const int64_t *keys = text.keys, *keys_end = keys + text.num_keys, *first = nullptr;
    int64_t low = 0, high = rule_.max_window - rule_.min_window + 1;
    length_ = num_found_ = 0;
    while (low < high) {
      const int64_t row = (low + high) / 2;
      const int64_t* key = std::lower_bound(keys, keys_end, tags_[row]);
      if (key < keys_end && (*key & rule_.tag_mask) == tags_[row]) {
        first = key;
        low = row + 1;
      } else {
        high = row;
      }
    }
    if (first == nullptr) return;
    const int64_t* last = std::upper_bound(first, keys_end, tags_[low - 1] | rule_.position_mask);
    length_ = common_length(last[-1] & rule_.position_mask);
    if (length_ < rule_.min_window + low - 1) return compare_all(text);  // two contexts share a tag
    for (; last > first && num_found_ < text.most_occurrences; last--) found_[num_found_++] = last[-1] & rule_.position_mask;
  }

  void compare_all(const DraftText& text) {
    length_ = rule_.min_window - 1;
    for (int64_t index = text.num_positions - 1; index >= 0; index--) {
      const int64_t length = common_length(text.positions[index]);
      if (length <= length_) continue;
      length_ = length;
      found_[0] = text.positions[index];
      num_found_ = 1;
    }
    if (num_found_ == 0) length_ = 0;
  }

  // The positions without a key, each of which is later than those found so far.
  void find_unsorted(const DraftText& text) {
    constexpr int64_t kBlock = 64;
    const int64_t first = text.num_sorted, most = text.most_occurrences;
    int64_t unsorted[kMostOccurrences], count = 0, shortest = std::max(length_, rule_.min_window);
    for (int64_t stop = size_ - 1; stop > first && (count < most || shortest < rule_.max_window); stop -= kBlock) {
      const int64_t start = std::max(stop - kBlock, first), second = std::min<int64_t>(shortest - 1, 1), furthest = shortest - 1;
      const int32_t a = end_[-1], b = end_[-1 - second], c = end_[-1 - furthest];
      int any = 0;
      for (int64_t p = start; p < stop; p++) any |= (text_[p] == a) & (text_[p - second] == b) & (text_[p - furthest] == c);
      if (!any) continue;
      for (int64_t p = stop - 1; p >= start; p--) {
        if (text_[p] != a) continue;
        const int64_t length = common_length(p);
        if (length < shortest) continue;
        if (length > shortest) count = 0;
        shortest = length;
        if (count < most) unsorted[count++] = p;
      }
    }
    if (count == 0) return;
    if (shortest > length_) num_found_ = 0;
    length_ = shortest;
    const int64_t retained = std::min(num_found_, most - count);
    std::copy_backward(found_, found_ + retained, found_ + retained + count);
    std::copy(unsorted, unsorted + count, found_);
    num_found_ = count + retained;
  }

  // Behind the end of the sequence what follows the position is repeated.
  int32_t next_token(int64_t position, int64_t draft, bool is_other) const {
    return text_[position + 1 + (is_other ? draft : draft % (size_ - 1 - position))];
  }

  void follow(bool is_other, int64_t most, DraftResult& result) {
    const double* survival = rule_.survival + std::min(length_, kLongestMatch) * kMostDrafts;
    double probability = 1.0;
    for (int64_t draft = 0; draft < most; draft++) {
      int32_t behind[kMostOccurrences];
      int64_t num_behind = 0, best = 0, best_count = 0;
      for (int64_t i = 0; i < num_found_; i++) {  // a text that ends is out
        const int32_t token = next_token(found_[i], draft, is_other);
        if (token < 0) continue;
        found_[num_behind] = found_[i];
        behind[num_behind++] = token;
      }
      for (int64_t i = 0; i < num_behind; i++) {  // the first of equals is the latest
        const int64_t count = std::count(behind + i, behind + num_behind, behind[i]);
        if (count > best_count) best = i, best_count = count;
      }
      if (num_behind == 0) return;
      const int32_t token = behind[best];
      const double next = probability * (double(best_count) / double(num_behind));
      if (next < rule_.min_probability) return;
      probability = next;
      num_found_ = 0;
      for (int64_t i = 0; i < num_behind; i++)
        if (behind[i] == token) found_[num_found_++] = found_[i];
      if (draft == 0) result.position = found_[0];
      const volatile double accepted = probability * survival[draft];
      result.survival[draft] = accepted;
      result.expected += accepted;
      result.tokens[draft] = token;
      result.count = draft + 1;
    }
  }

  const DraftRule& rule_;
  const int32_t* end_;  // of the sequence
  const int64_t size_;
  const int32_t* text_ = nullptr;
  int64_t tags_[kLongestMatch];
  int64_t length_ = 0, num_found_ = 0, found_[kMostOccurrences];
};

// Enters the contexts of positions first..last-1 among the keys of those before: the keys of a text are those that sorting all of it would give.
//
//     length n        keys          new positions          of the positions that have a key for length n, two share the context: they have one for n + 1
//     length n + 1    keys, and     new positions that share, and the earlier ones that have been alone so far
class ContextEntry {
 public:
  int64_t enter(const DraftRule& rule, const int32_t* padded, int64_t first, int64_t last, const int64_t* keys, int64_t num_keys, bool keeps_all) {
    rule_ = &rule;
    text_ = padded + rule.max_window;
    keys_ = keys;
    keys_end_ = keys + num_keys;
    added_.clear();
    removed_.clear();
    std::vector<Context> active, next;
    for (int64_t position = first; position < last; position++) active.push_back({position, sum(position, rule.min_window - 1)});
    for (int64_t length = rule.min_window; length <= rule.max_window && !active.empty(); length++, active.swap(next)) {
      next.clear();
      for (Context& context : active) {
        const int64_t position = context.key & rule.position_mask;
        context.sum += term(position, length - 1);
        context.key = tag(context.sum, length) | position;
      }
      std::sort(active.begin(), active.end(), [](const Context& left, const Context& right) { return left.key < right.key; });
      const size_t start = added_.size();
      const int64_t* key = keys_;
      for (size_t i = 0, stop; i < active.size(); i = stop) {
        const int64_t shared = active[i].key & rule.tag_mask;
        for (stop = i + 1; stop < active.size() && (active[stop].key & rule.tag_mask) == shared; stop++) {}
        key = first_not_below(key, shared);
        int64_t alone = -1;
        const int64_t num_earlier = count_earlier(key, shared, length, keeps_all, alone);
        if (keeps_all) {
          for (size_t j = i; j < stop; j++) added_.push_back(active[j].key);
        } else {
          added_.push_back(active[stop - 1].key);
          if (num_earlier > 0) removed_.push_back(shared | latest_);
        }
        if (num_earlier + int64_t(stop - i) < 2) continue;
        for (size_t j = i; j < stop; j++) next.push_back({active[j].key & rule.position_mask, active[j].sum});
        if (alone >= 0) next.push_back({alone, sum(alone, length)});
      }
      runs_.push_back(start);
    }
    merge_runs();
    std::sort(removed_.begin(), removed_.end());
    return num_keys + int64_t(added_.size()) - int64_t(removed_.size());
  }

  void take(int64_t* out) const {
    const int64_t* removed = removed_.data();
    const int64_t* const removed_end = removed + removed_.size();
    const int64_t* key = keys_;
    for (const int64_t added : added_) {
      for (; key < keys_end_ && *key < added; key++) {
        if (removed < removed_end && *key == *removed) removed++;
        else *out++ = *key;
      }
      *out++ = added;
    }
    for (; key < keys_end_; key++) {
      if (removed < removed_end && *key == *removed) removed++;
      else *out++ = *key;
    }
  }

 private:
  struct Context {
    int64_t key;
    uint64_t sum;
  };

  uint64_t term(int64_t position, int64_t before) const { return uint64_t(int64_t(text_[position - before])) * uint64_t(rule_->factors[before]); }

  uint64_t sum(int64_t position, int64_t length) const {
    uint64_t total = 0;
    for (int64_t before = 0; before < length; before++) total += term(position, before);
    return total;
  }

  int64_t tag(uint64_t sum, int64_t length) const { return int64_t(sum + uint64_t(rule_->salts[length - rule_->min_window])) & rule_->tag_mask; }

  // The first key from `key` on that is not below `value`; near ones are found first.
  const int64_t* first_not_below(const int64_t* key, int64_t value) const {
    int64_t step = 1;
    const int64_t* low = key;
    while (keys_end_ - low > step && low[step] < value) {
      low += step;
      step *= 2;
    }
    return std::lower_bound(low, low + std::min<int64_t>(step + 1, keys_end_ - low), value);
  }

  // How many earlier positions share the context, 2 for more; `alone`: the one that has had no key for the next length. Keys of other lengths may have
  // the same tag.
  int64_t count_earlier(const int64_t* key, int64_t shared, int64_t length, bool keeps_all, int64_t& alone) {
    int64_t count = 0;
    for (; key < keys_end_ && (*key & rule_->tag_mask) == shared && count < 2; key++) {
      const int64_t position = *key & rule_->position_mask;
      if (tag(sum(position, length), length) != shared) continue;
      latest_ = position;
      count++;
    }
    if (count == 1 && !keeps_all && length < rule_->max_window)  // the latest of several has a key for the next length
      count += std::binary_search(keys_, keys_end_, tag(sum(latest_, length + 1), length + 1) | latest_);
    if (count == 1) alone = latest_;
    return count;
  }

  // Sorts the added keys, which are sorted for each length.
  void merge_runs() {
    runs_.push_back(added_.size());
    while (runs_.size() > 2) {
      std::vector<size_t> merged;
      for (size_t i = 0; i + 2 < runs_.size(); i += 2) {
        std::inplace_merge(added_.begin() + runs_[i], added_.begin() + runs_[i + 1], added_.begin() + runs_[i + 2]);
        merged.push_back(runs_[i]);
      }
      if (runs_.size() % 2 == 0) merged.push_back(runs_[runs_.size() - 2]);
      merged.push_back(runs_.back());
      runs_.swap(merged);
    }
    runs_.clear();
  }

  const DraftRule* rule_ = nullptr;
  const int32_t* text_ = nullptr;
  const int64_t *keys_ = nullptr, *keys_end_ = nullptr;
  int64_t latest_ = 0;
  std::vector<int64_t> added_, removed_;
  std::vector<size_t> runs_;
};

thread_local ContextEntry context_entry;

}  // namespace rex

// What each of `num_texts` texts proposes for a sequence of `size` > 0 tokens.
extern "C" void RexTextDrafts(const rex::DraftRule* rule, const int32_t* padded, int64_t size, const rex::DraftText* texts, int64_t num_texts, int64_t most,
                              rex::DraftResult* results) {
  rex::DraftSearch search(*rule, padded, size);
  for (int64_t i = 0; i < num_texts; i++) search.draft(texts[i], most, results[i]);
}

// How many keys a text has with those of positions first..last-1; `keys`: those of the positions before, which live until RexTakeKeys writes all.
extern "C" int64_t RexEnterContexts(const rex::DraftRule* rule, const int32_t* padded, int64_t first, int64_t last, const int64_t* keys, int64_t num_keys,
                                    int64_t keeps_all) {
  return rex::context_entry.enter(*rule, padded, first, last, keys, num_keys, keeps_all != 0);
}

extern "C" void RexTakeKeys(int64_t* keys) { rex::context_entry.take(keys); }

// What the caller states, too: three constants, and the bytes of a rule, a text and a result.
extern "C" void RexDraftLayout(int64_t* layout) {
  const int64_t stated[] = {rex::kMostOccurrences,  rex::kMostDrafts,       rex::kLongestMatch,
                            sizeof(rex::DraftRule), sizeof(rex::DraftText), sizeof(rex::DraftResult)};
  std::copy(std::begin(stated), std::end(stated), layout);
}
