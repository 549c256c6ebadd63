#pragma once
#include <string>

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>

namespace fp4ext {

// A str argument of an op, which becomes a string once, where it is read.
//
// torch (2.10 to 2.13) would make a std::string of it by itself, and lose a copy at each call (pytorch issue 191340). The
// copies are small, but each one pins the heap where it lies: a training run grew by megabytes a step. Here the boundary
// (boundary.h) frees the handle when the call ends, also when it refuses.
struct Text {
  StringHandle handle;

  operator std::string() const {
    size_t length = 0;
    const char* data = nullptr;
    STD_TORCH_CHECK(torch_string_length(handle, &length) == 0 && torch_string_c_str(handle, &data) == 0, "an argument is no string");
    return std::string(data, length);
  }
};

}  // namespace fp4ext
