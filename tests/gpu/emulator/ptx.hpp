// Kernels as the PTX of nvcc or clang has them, read into what an interpreter wants: registers by index, labels by
// place, immediates as registers that nobody writes. What is not listed here is refused when it is read, by name.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "deltasync/result.hpp"

namespace deltasync::emulator {

enum class Op : std::uint8_t {
  ld,
  st,
  atom,  // of a space
  mov,
  pack,
  unpack,
  selp,
  setp,
  cvt,
  add,
  sub,
  mul_lo,
  mul_hi,
  mul_wide,
  mad_lo,
  div,
  rem,
  min,
  max,
  neg,
  and_,
  or_,
  xor_,
  not_,
  shl,
  shr,
  bfe,
  bra,
  ret,
  bar_sync,
  shfl,
  vote,
  bar_warp,  // of lanes that wait for each other
  activemask,
};
enum class Compare : std::uint8_t { eq, ne, lt, le, gt, ge };
enum class Space : std::uint8_t { global, shared, param };
/// What shfl, vote and atom do.
enum class Mode : std::uint8_t {
  none,
  up,
  down,
  bfly,
  idx,
  all,
  any,
  uni,
  ballot,
  add,
  min,
  max,
  and_,
  or_,
  xor_,
  exch,
  cas
};
/// Registers whose values the launch gives.
enum class Special : std::uint8_t { tid, ntid, ctaid, nctaid, laneid };

struct Type {
  std::uint8_t bits = 64;  ///< 1: a predicate
  bool is_signed = false;
};

using Registers = std::array<std::uint32_t, 5>;

struct Instruction {
  Op op = Op::ret;
  Type type;
  Type from_type;  ///< of cvt
  Compare compare = Compare::eq;
  Space space = Space::global;
  Mode mode = Mode::none;
  bool is_constant = false;    ///< ld.global.nc: nobody writes it during the launch
  bool guard_negated = false;  ///< @!%p
  bool has_predicate = false;  ///< shfl's second result
  std::uint8_t count = 1;      ///< of a vector, or of the pieces of pack and unpack
  std::uint8_t to_bits = 64;   ///< of the register that is written
  std::int32_t guard = -1;     ///< @%p: a register; negative if there is none
  Registers to{};
  Registers from{};                ///< of ld, st, atom: the address first
  std::int64_t offset = 0;         ///< of the address
  std::uint32_t target = 0;        ///< of bra
  std::uint32_t used_bytes = ~0u;  ///< a bit each: what else a load reads is not looked at
  std::uint32_t line = 0;
};

struct Function {
  std::string name;
  std::vector<Instruction> code;
  std::vector<std::uint8_t> register_bits;                         ///< of each register
  std::vector<std::pair<std::uint32_t, std::uint64_t>> constants;  ///< registers that have a value from the beginning
  std::vector<std::pair<std::uint32_t, Special>> specials;
  struct Parameter {
    std::uint32_t at = 0;
    std::uint32_t bytes = 0;
  };
  std::vector<Parameter> parameters;
  std::uint32_t parameter_bytes = 0;
  std::uint32_t shared_bytes = 0;
  std::uint32_t threads_max = 1024;
  std::map<std::uint32_t, std::string> text;  ///< by line, for messages
};

struct Module {
  std::map<std::string, Function, std::less<>> functions;
};

/// unsupported, naming line and text, for what is not emulated.
Result<Module> read_ptx(std::string_view text);

namespace detail {

/// What the instructions of a function refer to.
struct Names {
  Function& function;
  std::map<std::string, std::pair<std::uint32_t, std::uint32_t>, std::less<>> prefixes;  ///< first register, count
  std::map<std::string, std::uint32_t, std::less<>> registers;  ///< that have a name of their own, within a block
  std::map<std::uint64_t, std::uint32_t> constants;
  std::map<Special, std::uint32_t> specials;
  std::map<std::string, std::uint32_t, std::less<>> parameters;  ///< offsets
  std::map<std::string, std::uint32_t, std::less<>> shared;      ///< addresses
  std::vector<std::pair<std::size_t, std::string>> branches;     ///< whose labels are not known yet

  std::uint32_t new_register(std::uint8_t bits);
  std::uint32_t constant(std::uint64_t value);
  Result<std::uint32_t> operand(std::string_view text);
};

std::string_view trim(std::string_view text);
/// At separators outside of brackets, without empty ends.
std::vector<std::string_view> split(std::string_view text, char separator);
Result<Type> read_type(std::string_view text);
/// `text` without its semicolon.
Result<Instruction> read_instruction(std::string_view text, Names& names);

}  // namespace detail
}  // namespace deltasync::emulator
