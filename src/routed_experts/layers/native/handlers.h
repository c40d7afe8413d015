// What the XLA FFI handlers share: buffers as typed memory, and the C++ type of a dtype.
#pragma once
#include <string>

#include "gemm.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace rex {

template <class T>
T* at(ffi::AnyBuffer& buffer) {
  return reinterpret_cast<T*>(buffer.untyped_data());
}
template <class T>
T* at(ffi::Result<ffi::AnyBuffer>& buffer) {
  return reinterpret_cast<T*>(buffer->untyped_data());
}

// Nothing is converted on the way in: what a handler reads as one type must have it.
inline ffi::Error mismatch(const std::string& what) { return ffi::Error::InvalidArgument("dtypes or shapes differ: " + what); }

// Codes are told by their dtype: float8 for e4m3, int8 for whole numbers of 4 bits and uint8 for e2m1, both [R, I / 2, O].
inline bool is_codes(ffi::DataType type) { return type == ffi::F8E4M3FN || type == ffi::S8 || type == ffi::U8; }
inline Format format_of(ffi::DataType type) { return type == ffi::S8 ? Format::kInt4 : type == ffi::U8 ? Format::kE2m1 : Format::kE4m3; }
// An axis of what an array holds.
inline int64_t logical_dim(const ffi::AnyBuffer& array, int axis) {
  const bool halves = is_codes(array.element_type()) && format_of(array.element_type()) != Format::kE4m3;
  return array.dimensions()[axis] * (halves && axis == 1 ? 2 : 1);
}

constexpr int kSpanShift = 7;  // 128 outputs may share a scale

// A stack of matrices as handlers take it: numbers [R, I, O], or codes and their scales; scales are [0] beside numbers.
struct Matrices {
  ffi::AnyBuffer numbers, scales;
  int64_t group;  // 0 beside numbers
  bool coded() const { return is_codes(numbers.element_type()); }
  int64_t dim(int axis) const { return logical_dim(numbers, axis); }
  template <class T>
  const T* plain() { return numbers.element_count() == 0 ? nullptr : reinterpret_cast<const T*>(numbers.untyped_data()); }
  Codes codes() {
    const int64_t ld = scales.dimensions()[2];
    const ScaleDtype dtype = scales.element_type() == ffi::BF16 ? ScaleDtype::kBf16 : ScaleDtype::kFloat32;
    const ScaleRows rows{scales.untyped_data(), dtype, ld, ld == dim(2) ? 0 : kSpanShift};
    return {format_of(numbers.element_type()), static_cast<const uint8_t*>(numbers.untyped_data()), rows, group};
  }
};

// "[2, 64]".
template <class Dims>
std::string shape_text(const Dims& dims) {
  std::string text = "[";
  for (const int64_t dim : dims) text += (text.size() > 1 ? ", " : "") + std::to_string(dim);
  return text + "]";
}

// What is wrong with the scales of a stack, of this name; "" if nothing is.
inline std::string scales_fault(const Matrices& w, const std::string& name) {
  if (!w.coded()) return w.group == 0 && w.scales.element_count() == 0 ? "" : name + " are not codes, but have scales";
  if (w.group != 16 && w.group != 32 && w.group != 64 && w.group != 128)
    return "a group of " + name + " is " + std::to_string(w.group) + " inputs, not 16, 32, 64 or 128";
  const ffi::DataType type = w.scales.element_type();
  if (type != ffi::F32 && type != ffi::BF16) return "scales of " + name + " are float32 or bfloat16";
  const int64_t dims[] = {w.dim(0), (w.dim(1) + w.group - 1) / w.group, w.dim(2)};
  const auto have = w.scales.dimensions();
  if (have.size() == 3 && std::equal(have.begin(), have.begin() + 2, dims) && (have[2] == dims[2] || have[2] << kSpanShift == dims[2])) return "";
  return "scales of " + name + " are " + shape_text(have) + ", not " + shape_text(dims) + ", or with a scale for each " + std::to_string(1 << kSpanShift) + " outputs";
}

// Call `body` with a value of the C++ type of `dtype`.
template <class Body>
ffi::Error dispatch_dtype(ffi::DataType dtype, Body&& body) {
  switch (dtype) {
    case ffi::F32: return body(float{});
    case ffi::BF16: return body(bf16{});
    case ffi::F16: return body(f16{});
    default: return ffi::Error::InvalidArgument("the dtype must be float32, bfloat16 or float16");
  }
}

// The same for a pool of keys and values, which may be codes in bytes.
template <class Body>
ffi::Error dispatch_pool(ffi::DataType dtype, Body&& body) {
  return dtype == ffi::U8 ? body(kv8{}) : dispatch_dtype(dtype, body);
}

// Call `body` with values of the types of rows and of the weights that they meet. Rows are floats, or what the weights are.
template <class Body>
ffi::Error dispatch_rows(ffi::DataType rows, ffi::DataType weights, Body&& body) {
  return dispatch_dtype(weights, [&](auto type) {
    if (rows == ffi::F32) return body(float{}, type);
    if (rows == weights) return body(type, type);
    return mismatch("rows are float32, or have the dtype of the weights");
  });
}

}  // namespace rex
