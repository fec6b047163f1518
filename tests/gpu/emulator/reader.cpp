// PTX as nvcc and clang write it: an instruction, a label or a directive a line. The grammar is NVIDIA's "PTX ISA".
#include <algorithm>
#include <charconv>
#include <cstdlib>

#include "tests/gpu/emulator/ptx.hpp"

namespace deltasync::emulator {
namespace detail {

std::string_view trim(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r\n";
  const std::size_t begin = text.find_first_not_of(kBlank);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlank) - begin + 1);
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  int depth = 0;
  std::size_t begin = 0;
  for (std::size_t i = 0; i <= text.size(); ++i) {
    const char c = i < text.size() ? text[i] : separator;
    if (c == '{' || c == '[') ++depth;
    if (c == '}' || c == ']') --depth;
    if (c != separator || (depth != 0 && i < text.size())) continue;
    const std::string_view part = trim(text.substr(begin, i - begin));
    if (!part.empty()) parts.push_back(part);
    begin = i + 1;
  }
  return parts;
}

Result<Type> read_type(std::string_view text) {
  constexpr std::array<std::string_view, 13> kTypes{"u8",  "u16", "u32", "u64", "s8",  "s16", "s32",
                                                    "s64", "b8",  "b16", "b32", "b64", "pred"};
  if (std::find(kTypes.begin(), kTypes.end(), text) == kTypes.end()) {
    return Error(Errc::unsupported, "no such type here: " + std::string(text));
  }
  if (text == "pred") return Type{1, false};
  Type type{0, text[0] == 's'};
  std::from_chars(text.data() + 1, text.data() + text.size(), type.bits);
  return type;
}

std::uint32_t Names::new_register(std::uint8_t bits) {
  function.register_bits.push_back(bits);
  return static_cast<std::uint32_t>(function.register_bits.size() - 1);
}

std::uint32_t Names::constant(std::uint64_t value) {
  const auto known = constants.find(value);
  if (known != constants.end()) return known->second;
  const std::uint32_t made = new_register(64);
  constants[value] = made;
  function.constants.emplace_back(made, value);
  return made;
}

Result<std::uint32_t> Names::operand(std::string_view text) {
  static const std::map<std::string_view, Special> kSpecials{{"%tid.x", Special::tid},
                                                             {"%ntid.x", Special::ntid},
                                                             {"%ctaid.x", Special::ctaid},
                                                             {"%nctaid.x", Special::nctaid},
                                                             {"%laneid", Special::laneid}};
  const Error unknown(Errc::unsupported, "no such operand here: " + std::string(text));
  if (text.empty()) return unknown;
  if (const auto found = kSpecials.find(text); found != kSpecials.end()) {
    const auto [at, is_new] = specials.try_emplace(found->second, 0);
    if (is_new) {
      at->second = new_register(32);
      function.specials.emplace_back(at->second, found->second);
    }
    return at->second;
  }
  if (text[0] == '%') {
    const std::size_t digits = text.find_first_of("0123456789");
    if (digits == std::string_view::npos) return unknown;
    const auto prefix = prefixes.find(text.substr(0, digits));
    std::uint32_t number = 0;
    const auto read = std::from_chars(text.data() + digits, text.data() + text.size(), number);
    if (prefix == prefixes.end() || read.ptr != text.data() + text.size() || number >= prefix->second.second) {
      return unknown;
    }
    return prefix->second.first + number;
  }
  if (const auto at = registers.find(text); at != registers.end()) return at->second;
  // Addresses within their space.
  if (const auto at = shared.find(text); at != shared.end()) return constant(at->second);
  if (const auto at = parameters.find(text); at != parameters.end()) return constant(at->second);
  const std::string number(text.substr(0, text.back() == 'U' ? text.size() - 1 : text.size()));
  char* end = nullptr;
  const std::uint64_t value = number[0] == '-' ? static_cast<std::uint64_t>(std::strtoll(number.c_str(), &end, 0))
                                               : std::strtoull(number.c_str(), &end, 0);
  if (end == number.c_str() || *end != '\0') return unknown;
  return constant(value);
}

namespace {

std::uint32_t number_after(std::string_view text, std::string_view word, std::uint32_t otherwise) {
  const std::size_t at = text.find(word);
  if (at == std::string_view::npos) return otherwise;
  std::uint32_t value = otherwise;
  std::from_chars(text.data() + at + word.size(), text.data() + text.size(), value);
  return value;
}

struct Variable {
  std::string name;
  std::uint32_t at = 0;
  std::uint32_t bytes = 0;
};

/// ".param .align 8 .b8 name[48]" or ".shared .u32 name": placed behind the `used` bytes, which grow.
Result<Variable> read_variable(std::string_view text, std::uint32_t& used) {
  const auto words = split(text, ' ');
  std::string_view name = words.back();
  std::uint32_t count = 1;
  if (const std::size_t bracket = name.find('['); bracket != std::string_view::npos) {
    count = number_after(name, "[", 0);
    name = name.substr(0, bracket);
  }
  if (words.size() < 3 || count == 0) return Error(Errc::unsupported, "no such variable here: " + std::string(text));
  DS_ASSIGN(const Type type, read_type(words[words.size() - 2].substr(1)));
  const std::uint32_t align = number_after(text, ".align ", type.bits / 8u);
  used = (used + align - 1) / align * align;
  const Variable made{std::string(name), used, count * type.bits / 8};
  used += made.bytes;
  return made;
}

/// Everything before the opening brace.
Status read_head(std::string_view head, Names& names) {
  Function& function = names.function;
  const std::size_t open = head.find('(');
  if (open != std::string_view::npos) {
    const std::size_t close = head.find(')', open);
    for (const std::string_view text : split(head.substr(open + 1, close - open - 1), ',')) {
      DS_ASSIGN(const Variable parameter, read_variable(text, function.parameter_bytes));
      function.parameters.push_back({parameter.at, parameter.bytes});
      names.parameters[parameter.name] = parameter.at;
    }
  }
  function.threads_max = number_after(head, ".maxntid ", function.threads_max);
  return {};
}

Status read_directive(std::string_view line, Names& names, std::uint32_t& used_bytes) {
  const std::string_view text = line.substr(0, line.size() - 1);  // without the semicolon
  if (line.starts_with(".pragma \"used_bytes_mask ")) {
    used_bytes = number_after(line, "used_bytes_mask ", ~0u);
    return {};
  }
  if (line.starts_with(".pragma \"nounroll\"") || line.starts_with(".loc ")) return {};
  if (line.starts_with(".shared ")) {
    DS_ASSIGN(const Variable variable, read_variable(text, names.function.shared_bytes));
    names.shared[variable.name] = variable.at;
    return {};
  }
  std::string blanks(text.substr(0, text.find('<')));
  std::replace(blanks.begin(), blanks.end(), '\t', ' ');
  const auto words = split(blanks, ' ');
  if (words.front() != ".reg" || words.size() != 3) {
    return Error(Errc::unsupported, "no such directive here: " + std::string(line));
  }
  DS_ASSIGN(const Type type, read_type(words[1].substr(1)));
  if (text.find('<') == std::string_view::npos) {
    names.registers[std::string(words[2])] = names.new_register(type.bits);
    return {};
  }
  const std::uint32_t count = number_after(text, "<", 0);
  const auto first = static_cast<std::uint32_t>(names.function.register_bits.size());
  for (std::uint32_t i = 0; i < count; ++i) names.new_register(type.bits);
  names.prefixes[std::string(words[2])] = {first, count};
  return {};
}

/// Lines of a text, without comments and blanks, with their numbers.
class Lines {
 public:
  explicit Lines(std::string_view text) : left_(text) {}

  /// Empty at the end.
  std::string_view next() {
    while (!left_.empty()) {
      const std::size_t end = std::min(left_.find('\n'), left_.size());
      std::string_view line = left_.substr(0, end);
      left_.remove_prefix(std::min(end + 1, left_.size()));
      ++number_;
      line = trim(line.substr(0, line.find("//")));
      if (!line.empty()) return line;
    }
    return {};
  }
  std::uint32_t number() const noexcept { return number_; }

 private:
  std::string_view left_;
  std::uint32_t number_ = 0;
};

/// A directive or an instruction, with its semicolon; or a block of some in one line, as clang writes them.
Status read_line(std::string_view line, std::uint32_t number, Names& names, std::uint32_t& used_bytes) {
  if (line.front() == '{' && line.back() == '}') {
    for (const std::string_view part : split(line.substr(1, line.size() - 2), ';')) {
      DS_TRY(read_line(std::string(part) + ";", number, names, used_bytes));
    }
    return {};
  }
  if (line.front() == '.') return read_directive(line, names, used_bytes);
  auto read = read_instruction(line.back() == ';' ? line.substr(0, line.size() - 1) : line, names);
  if (!read.ok()) return std::move(read).error().with_context(std::string(line));
  Instruction instruction = *read;
  instruction.used_bytes = std::exchange(used_bytes, ~0u);
  instruction.line = number;
  names.function.text[number] = std::string(line);
  names.function.code.push_back(instruction);
  return {};
}

Status read_body(Lines& lines, Names& names) {
  Function& function = names.function;
  std::map<std::string, std::uint32_t, std::less<>> labels;
  std::uint32_t used_bytes = ~0u;
  for (std::string_view line = lines.next(); line != "}"; line = lines.next()) {
    if (line.empty()) return Error(Errc::unsupported, function.name + " does not end");
    if (line.back() == ':') {
      labels[std::string(line.substr(0, line.size() - 1))] = static_cast<std::uint32_t>(function.code.size());
    } else {
      DS_TRY(read_line(line, lines.number(), names, used_bytes));
    }
  }
  for (const auto& [at, label] : names.branches) {
    const auto found = labels.find(label);
    if (found == labels.end()) return Error(Errc::unsupported, "no label " + label);
    function.code[at].target = found->second;
  }
  return {};
}

}  // namespace
}  // namespace detail

Result<Module> read_ptx(std::string_view text) {
  Module module;
  detail::Lines lines(text.substr(0, text.find('\0')));
  std::string head;
  for (std::string_view line = lines.next(); !line.empty(); line = lines.next()) {
    constexpr std::array<std::string_view, 3> kOfModule{".version", ".target", ".address_size"};
    const auto begins = [&](std::string_view word) { return line.starts_with(word); };
    if (head.empty() && std::any_of(kOfModule.begin(), kOfModule.end(), begins)) continue;
    if (line != "{") {
      head += std::string(line) + " ";
      continue;
    }
    const std::size_t at = head.find(".entry ");
    const std::string where = "PTX line " + std::to_string(lines.number());
    if (at == std::string::npos) return Error(Errc::unsupported, where + ": only kernels are emulated: " + head);
    const std::string name(detail::trim(std::string_view(head).substr(at + 7, head.find('(', at) - at - 7)));
    Function& function = module.functions[name];
    function.name = name;
    detail::Names names{function, {}, {}, {}, {}, {}, {}, {}};
    DS_TRY(detail::read_head(std::string_view(head).substr(at), names).with_context(where));
    Status body = detail::read_body(lines, names);
    if (!body.ok()) return std::move(body).error().with_context("PTX line " + std::to_string(lines.number()));
    head.clear();
  }
  if (!head.empty()) return Error(Errc::unsupported, "PTX: not emulated: " + head);
  return module;
}

}  // namespace deltasync::emulator
