// What the emulator's own tests run: kernels of a few lines.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "tests/gpu/emulator/lanes.hpp"
#include "tests/gpu/emulator/launch.hpp"

namespace deltasync::emulator {

class Machine {
 public:
  /// A kernel with these lines, in which %rd10 and %rd11 are the parameters `in` and `out`, %r10 is the thread and %r11
  /// the block.
  static std::string kernel(const std::string& body) {
    return R"(.version 9.0
.target sm_80
.address_size 64
.visible .entry test(
	.param .u64 test_param_0,
	.param .u64 test_param_1
)
.maxntid 1024, 1, 1
{
	.reg .pred 	%p<20>;
	.reg .b16 	%rs<20>;
	.reg .b32 	%r<20>;
	.reg .b64 	%rd<20>;
	ld.param.u64 	%rd10, [test_param_0];
	ld.param.u64 	%rd11, [test_param_1];
	mov.u32 	%r10, %tid.x;
	mov.u32 	%r11, %ctaid.x;
)" + body + "\n\tret;\n}\n";
  }

  explicit Machine(const std::string& body, std::uint32_t threads = 32, std::uint32_t blocks = 1)
      : threads_(threads), blocks_(blocks) {
    auto read = read_ptx(kernel(body));
    if (!read.ok()) ADD_FAILURE() << read.error().message();
    if (read.ok()) module_ = *std::move(read);
  }

  /// Device memory that has these values.
  template <class T>
  std::byte* up(const std::vector<T>& values, int device = 0) {
    std::byte* const at = memory_.allocate(device, values.size() * sizeof(T));
    std::memcpy(memory_.real(at), values.data(), values.size() * sizeof(T));
    return at;
  }
  template <class T>
  std::vector<T> down(const std::byte* at, std::size_t count) const {
    std::vector<T> values(count);
    std::memcpy(values.data(), memory_.real(at), count * sizeof(T));
    return values;
  }
  std::optional<Fault> run(const std::byte* in, const std::byte* out, std::uint64_t seed = 1) {
    const auto found = module_.functions.find("test");
    if (found == module_.functions.end()) return Fault{Fault::Kind::other, "there is no kernel"};
    Launch launch{&found->second, std::vector<std::byte>(16), blocks_, threads_, 0, seed};
    std::memcpy(launch.parameters.data(), &in, sizeof in);
    std::memcpy(launch.parameters.data() + 8, &out, sizeof out);
    return emulator::run(launch, memory_);
  }
  Memory& memory() { return memory_; }

 private:
  Memory memory_{std::uint64_t{1} << 30};
  Module module_;
  const std::uint32_t threads_;
  const std::uint32_t blocks_;
};

}  // namespace deltasync::emulator
