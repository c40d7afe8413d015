"""What draft models propose while an engine runs, and answers in a form that is compared to the last bit."""

from collections import defaultdict

from routed_experts.speculation.model_drafter import ModelDrafter


class Offers:
    """What the draft model has proposed: by request, (tokens known, drafts up to the first that is missing,
    probabilities of these)."""

    def __init__(self, monkeypatch):
        self.by_request = defaultdict(list)
        offer = ModelDrafter.offer

        def record(drafter, key, length, tokens, probabilities):
            drafts = tokens.tolist()
            drafts = drafts[: drafts.index(-1)] if -1 in drafts else drafts
            self.by_request[key].append((length, drafts, probabilities[: len(drafts)].tolist()))
            offer(drafter, key, length, tokens, probabilities)

        monkeypatch.setattr(ModelDrafter, "offer", record)


def answers(engine, prompts, temperature=0.0, *, new=16, **sampling):
    """Tokens, logprobs and rows of each answer, and its meta_info; requests are call-0, call-1, .."""
    sampling = {"temperature": temperature, "seed": 3, "ignore_eos": True, "max_new_tokens": new} | sampling
    outs = engine.generate(
        input_ids=prompts,
        sampling_params=sampling,
        return_logprob=True,
        return_routed_experts=True,
        rid="call",
    )
    metas = [out["meta_info"] for out in outs]
    return [
        (out["output_ids"], meta["output_token_logprobs"], meta["routed_experts"])
        for out, meta in zip(outs, metas, strict=True)
    ], metas
