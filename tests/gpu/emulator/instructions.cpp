// One instruction of PTX.
#include <algorithm>
#include <cstdlib>
#include <optional>

#include "tests/gpu/emulator/ptx.hpp"

namespace deltasync::emulator::detail {
namespace {

using Parts = std::vector<std::string_view>;

// Arrays, which are there before any static constructor: modules are read in one.
template <class T>
using Words = std::pair<std::string_view, T>;

template <class T, std::size_t kCount>
std::optional<T> find(const Words<T> (&table)[kCount], std::string_view word) {
  for (const auto& [known, value] : table) {
    if (known == word) return value;
  }
  return std::nullopt;
}

constexpr Words<Op> kPlain[] = {{"add", Op::add}, {"sub", Op::sub},   {"div", Op::div},  {"rem", Op::rem},
                                {"min", Op::min}, {"max", Op::max},   {"neg", Op::neg},  {"and", Op::and_},
                                {"or", Op::or_},  {"xor", Op::xor_},  {"not", Op::not_}, {"shl", Op::shl},
                                {"shr", Op::shr}, {"selp", Op::selp}, {"bfe", Op::bfe}};
constexpr Words<Op> kMultiply[] = {
    {"mul.lo", Op::mul_lo}, {"mul.hi", Op::mul_hi}, {"mul.wide", Op::mul_wide}, {"mad.lo", Op::mad_lo}};
constexpr Words<Compare> kCompare[] = {
    {"eq", Compare::eq}, {"ne", Compare::ne}, {"lt", Compare::lt}, {"le", Compare::le}, {"gt", Compare::gt},
    {"ge", Compare::ge}, {"lo", Compare::lt}, {"ls", Compare::le}, {"hi", Compare::gt}, {"hs", Compare::ge}};
constexpr Words<Mode> kShuffle[] = {{"up", Mode::up}, {"down", Mode::down}, {"bfly", Mode::bfly}, {"idx", Mode::idx}};
constexpr Words<Mode> kVote[] = {{"all", Mode::all}, {"any", Mode::any}, {"uni", Mode::uni}, {"ballot", Mode::ballot}};
constexpr Words<Mode> kAtom[] = {{"add", Mode::add}, {"min", Mode::min},  {"max", Mode::max},   {"and", Mode::and_},
                                 {"or", Mode::or_},  {"xor", Mode::xor_}, {"exch", Mode::exch}, {"cas", Mode::cas}};

class Reader {
 public:
  Reader(std::string_view text, Names& names) : text_(text), names_(names) {}

  Result<Instruction> read() {
    std::string_view rest = text_;
    if (rest.front() == '@') {
      made_.guard_negated = rest[1] == '!';
      const std::size_t name = made_.guard_negated ? 2 : 1;
      const std::size_t end = rest.find_first_of(" \t");
      DS_ASSIGN(const std::uint32_t guard, names_.operand(rest.substr(name, end - name)));
      made_.guard = static_cast<std::int32_t>(guard);
      rest = trim(rest.substr(end));
    }
    const std::size_t end = std::min(rest.find_first_of(" \t"), rest.size());
    name_ = split(rest.substr(0, end), '.');
    operands_ = split(rest.substr(end), ',');
    DS_TRY(read_named());
    const bool writes = made_.op != Op::st && made_.op != Op::bra && !operands_.empty();
    if (writes) made_.to_bits = names_.function.register_bits[made_.to[0]];
    return made_;
  }

 private:
  Error unknown() const { return {Errc::unsupported, "no such instruction here"}; }
  bool says(std::string_view word) const { return std::find(name_.begin(), name_.end(), word) != name_.end(); }

  Status read_named() {
    const std::string_view first = name_.front();
    if (first == "bra") return read_branch();
    if (first == "ret" || first == "exit") return name_.size() == 1 ? Status() : unknown();
    if (first == "bar" || first == "barrier") return read_barrier();
    if (first == "activemask") {
      made_.op = Op::activemask;
      made_.type = {32, false};
      return registers(made_.to, 0, 1);
    }
    if (first == "shfl") return read_shuffle();
    if (first == "vote") return read_vote();
    DS_ASSIGN(made_.type, read_type(name_.back()));
    if (first == "ld" || first == "st") return read_access();
    if (first == "atom" || first == "red") return read_atomic();
    if (first == "mov") return read_move();
    // Generic addresses of global memory are those within it.
    if (first == "cvta") return says("global") && name_.size() == (says("to") ? 4 : 3) ? move(Op::mov) : unknown();
    if (first == "cvt") return read_convert();
    if (first == "setp") {
      const auto compare = find(kCompare, name_[1]);
      if (!compare || name_.size() != 3 || operands_.size() != 3) return unknown();
      made_.compare = *compare;
      return plain(Op::setp);
    }
    if (const auto op = find(kPlain, first); op && name_.size() == 2) return plain(*op);
    if (name_.size() == 3) {
      const std::string both = std::string(first) + "." + std::string(name_[1]);
      if (const auto op = find(kMultiply, both)) return plain(*op);
    }
    return unknown();
  }

  /// One result, and the operands that follow.
  Status plain(Op op) {
    made_.op = op;
    const std::size_t wanted = op == Op::selp || op == Op::mad_lo || op == Op::bfe ? 4
                               : op == Op::not_ || op == Op::neg                   ? 2
                                                                                   : 3;
    if (operands_.size() != wanted) return unknown();
    DS_TRY(registers(made_.to, 0, 1));
    return registers(made_.from, 1, wanted - 1);
  }
  Status move(Op op) {
    made_.op = op;
    if (operands_.size() != 2) return unknown();
    DS_TRY(registers(made_.to, 0, 1));
    return registers(made_.from, 1, 1);
  }
  Status registers(Registers& out, std::size_t first, std::size_t count) {
    if (first + count > operands_.size()) return unknown();
    for (std::size_t i = 0; i < count; ++i) {
      DS_ASSIGN(out[i], names_.operand(operands_[first + i]));
    }
    return {};
  }
  /// "{%r1, %r2}" or "%r1", from out[first] on.
  Status vector(std::string_view text, Registers& out, std::size_t first) {
    Parts parts{text};
    if (text.front() == '{') parts = split(text.substr(1, text.size() - 2), ',');
    if (parts.empty() || first + parts.size() > out.size()) return unknown();
    for (std::size_t i = 0; i < parts.size(); ++i) {
      DS_ASSIGN(out[first + i], names_.operand(parts[i]));
    }
    made_.count = static_cast<std::uint8_t>(parts.size());
    return {};
  }
  /// "[%rd1+8]", "[name+8]".
  Status address(std::string_view text) {
    if (text.front() != '[') return unknown();
    text = text.substr(1, text.size() - 2);
    const std::size_t plus = text.find('+');
    if (plus != std::string_view::npos)
      made_.offset = std::strtoll(std::string(text.substr(plus + 1)).c_str(), nullptr, 0);
    text = trim(text.substr(0, plus));
    if (made_.space == Space::param) {
      const bool is_known = text.starts_with('%') || names_.parameters.contains(text);
      if (!is_known) return Error(Errc::unsupported, "no parameter " + std::string(text));
    }
    DS_ASSIGN(made_.from[0], names_.operand(text));
    return {};
  }

  Status read_branch() {
    made_.op = Op::bra;
    if (operands_.size() != 1 || (name_.size() == 2 && !says("uni")) || name_.size() > 2) return unknown();
    names_.branches.emplace_back(names_.function.code.size(), std::string(operands_[0]));
    return {};
  }
  Status read_barrier() {
    if (name_.size() == 3 && says("warp") && says("sync") && operands_.size() == 1) {
      made_.op = Op::bar_warp;
      DS_TRY(registers(made_.from, 0, 1));
    } else if (name_.size() == 2 && says("sync") && operands_.size() == 1 && operands_[0] == "0") {
      made_.op = Op::bar_sync;
    } else {
      return unknown();
    }
    operands_.clear();  // no result
    return {};
  }
  Status read_shuffle() {
    const auto mode = name_.size() == 4 ? find(kShuffle, name_[2]) : std::nullopt;
    if (!mode || name_[1] != "sync" || name_[3] != "b32" || operands_.size() != 5) return unknown();
    made_.op = Op::shfl;
    made_.mode = *mode;
    made_.type = {32, false};
    const Parts results = split(operands_[0], '|');
    made_.has_predicate = results.size() == 2;
    for (std::size_t i = 0; i < results.size() && i < 2; ++i) {
      DS_ASSIGN(made_.to[i], names_.operand(results[i]));
    }
    return registers(made_.from, 1, 4);
  }
  Status read_vote() {
    const auto mode = name_.size() == 4 ? find(kVote, name_[2]) : std::nullopt;
    if (!mode || name_[1] != "sync" || operands_.size() != 3) return unknown();
    made_.op = Op::vote;
    made_.mode = *mode;
    DS_TRY(registers(made_.to, 0, 1));
    return registers(made_.from, 1, 2);
  }
  Status read_access() {
    const bool load = name_.front() == "ld";
    made_.op = load ? Op::ld : Op::st;
    made_.space = says("param") && load ? Space::param : says("shared") ? Space::shared : Space::global;
    made_.is_constant = says("nc");
    for (std::size_t i = 1; i + 1 < name_.size(); ++i) {
      constexpr std::array<std::string_view, 6> kKnown{"global", "shared", "param", "nc", "v2", "v4"};
      if (std::find(kKnown.begin(), kKnown.end(), name_[i]) == kKnown.end()) return unknown();
    }
    if (operands_.size() != 2) return unknown();
    DS_TRY(address(operands_[load ? 1 : 0]));
    if (load) return vector(operands_[0], made_.to, 0);
    return vector(operands_[1], made_.from, 1);
  }
  Status read_atomic() {
    const bool has_result = name_.front() == "atom";
    made_.op = Op::atom;
    made_.space = says("shared") ? Space::shared : Space::global;
    for (std::size_t i = 1; i + 1 < name_.size(); ++i) {
      if (const auto mode = find(kAtom, name_[i]))
        made_.mode = *mode;
      else if (name_[i] != "global" && name_[i] != "shared" && name_[i] != "relaxed" && name_[i] != "gpu")
        return unknown();
    }
    const std::size_t values = made_.mode == Mode::cas ? 2 : 1;
    if (made_.mode == Mode::none || made_.type.bits < 32 || operands_.size() != has_result + 1 + values)
      return unknown();
    DS_TRY(address(operands_[has_result]));
    for (std::size_t i = 0; i < values; ++i) {
      DS_ASSIGN(made_.from[1 + i], names_.operand(operands_[has_result + 1 + i]));
    }
    if (has_result) return registers(made_.to, 0, 1);
    made_.to[0] = names_.new_register(64);  // which nobody reads
    return {};
  }
  Status read_move() {
    if (name_.size() != 2 || operands_.size() != 2) return unknown();
    if (operands_[0].front() == '{') {
      made_.op = Op::unpack;
      DS_TRY(vector(operands_[0], made_.to, 0));
      return registers(made_.from, 1, 1);
    }
    if (operands_[1].front() != '{') return move(Op::mov);
    made_.op = Op::pack;
    DS_TRY(registers(made_.to, 0, 1));
    return vector(operands_[1], made_.from, 0);
  }
  Status read_convert() {
    if (name_.size() != 3) return unknown();
    made_.from_type = made_.type;
    DS_ASSIGN(made_.type, read_type(name_[1]));
    return move(Op::cvt);
  }

  const std::string_view text_;
  Names& names_;
  Instruction made_;
  Parts name_;
  Parts operands_;
};

}  // namespace

Result<Instruction> read_instruction(std::string_view text, Names& names) {
  return Reader(text, names).read();
}

}  // namespace deltasync::emulator::detail
