// What the XLA FFI handlers share: buffers as typed memory, and the C++ type of a dtype.
#pragma once
#include <string>

#include "vec.h"
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

// "[2, 64]".
template <class Dims>
std::string shape_text(const Dims& dims) {
  std::string text = "[";
  for (const int64_t dim : dims) text += (text.size() > 1 ? ", " : "") + std::to_string(dim);
  return text + "]";
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
