#include "export/expression.hpp"

#include <cctype>
#include <charconv>
#include <cmath>
#include <utility>

namespace deltasync::exporting {
namespace {

constexpr int kDepthMax = 64;                     ///< of parentheses: pages may come from anybody
constexpr double kWholeMax = 4503599627370496.0;  ///< 2^52: whole numbers are exact

using Value = std::optional<double>;

bool begins_name(char c) {
  return std::isalpha(static_cast<unsigned char>(c)) != 0 || c == '_';
}
bool goes_on_name(char c) {
  return begins_name(c) || std::isdigit(static_cast<unsigned char>(c)) != 0 || c == '.';
}

/// Recursive descent, one function for each level of binding, the loosest first.
class Parser {
 public:
  Parser(std::string_view text, const Names& names, std::string* missing)
      : text_(text), names_(names), missing_(missing) {}

  Result<Value> whole() {
    DS_ASSIGN(const Value value, alternatives());
    skip();
    if (at_ != text_.size()) return wrong("nothing more is wanted");
    return value;
  }

 private:
  Error wrong(const std::string& what) const {
    return {Errc::invalid_argument,
            "'" + std::string(text_) + "': at character " + std::to_string(at_ + 1) + ": " + what};
  }

  void skip() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
  }
  bool take(std::string_view token) {
    skip();
    if (text_.substr(at_, token.size()) != token) return false;
    const bool word = begins_name(token.front());
    if (word && at_ + token.size() < text_.size() && goes_on_name(text_[at_ + token.size()])) return false;
    at_ += token.size();
    return true;
  }

  Result<Value> alternatives() {
    DS_ASSIGN(Value value, disjunction());
    while (take("|")) {
      DS_ASSIGN(const Value other, disjunction());
      if (!value) value = other;
    }
    return value;
  }
  Result<Value> disjunction() {
    DS_ASSIGN(Value value, conjunction());
    while (take("or")) {
      DS_ASSIGN(const Value other, conjunction());
      value = value && other ? Value(*value != 0 || *other != 0 ? 1 : 0) : std::nullopt;
    }
    return value;
  }
  Result<Value> conjunction() {
    DS_ASSIGN(Value value, negation());
    while (take("and")) {
      DS_ASSIGN(const Value other, negation());
      value = value && other ? Value(*value != 0 && *other != 0 ? 1 : 0) : std::nullopt;
    }
    return value;
  }
  Result<Value> negation() {
    if (!take("not")) return comparison();
    if (++depth_ > kDepthMax) return wrong("too deep");
    DS_ASSIGN(const Value value, negation());
    --depth_;
    return value ? Value(*value == 0 ? 1 : 0) : std::nullopt;
  }
  Result<Value> comparison() {
    DS_ASSIGN(const Value left, sum());
    for (const std::string_view sign : {"==", "!=", "<=", ">=", "<", ">"}) {
      if (!take(sign)) continue;
      DS_ASSIGN(const Value right, sum());
      if (!left || !right) return Value();
      const bool holds = sign == "=="   ? *left == *right
                         : sign == "!=" ? *left != *right
                         : sign == "<=" ? *left <= *right
                         : sign == ">=" ? *left >= *right
                         : sign == "<"  ? *left < *right
                                        : *left > *right;
      return Value(holds ? 1 : 0);
    }
    return left;
  }
  Result<Value> sum() {
    DS_ASSIGN(Value value, product());
    for (;;) {
      const bool plus = take("+");
      if (!plus && !take("-")) return value;
      DS_ASSIGN(const Value other, product());
      value = value && other ? Value(plus ? *value + *other : *value - *other) : std::nullopt;
    }
  }
  Result<Value> product() {
    DS_ASSIGN(Value value, factor());
    for (;;) {
      const bool times = take("*");
      if (!times && !take("/")) return value;
      DS_ASSIGN(const Value other, factor());
      if (!times && other && *other == 0) return wrong("a division by zero");
      value = value && other ? Value(times ? *value * *other : *value / *other) : std::nullopt;
    }
  }
  Result<Value> factor() {
    skip();
    if (at_ == text_.size()) return wrong("a number, a name or '(' is wanted");
    if (take("(")) {
      if (++depth_ > kDepthMax) return wrong("too deep");
      DS_ASSIGN(const Value value, alternatives());
      --depth_;
      if (!take(")")) return wrong("')' is wanted");
      return value;
    }
    if (take("true")) return Value(1);
    if (take("false")) return Value(0);
    if (begins_name(text_[at_])) return name();
    double number = 0;
    const auto [end, failed] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), number);
    if (failed != std::errc() || !std::isfinite(number)) return wrong("a number, a name or '(' is wanted");
    at_ = static_cast<std::size_t>(end - text_.data());
    return Value(number);
  }
  Result<Value> name() {
    const std::size_t begin = at_;
    while (at_ < text_.size() && goes_on_name(text_[at_])) ++at_;
    const std::string found(text_.substr(begin, at_ - begin));
    DS_ASSIGN(const Value value, names_(found));
    if (!value && missing_ != nullptr) *missing_ = found;
    return value;
  }

  const std::string_view text_;
  const Names& names_;
  std::string* const missing_;
  std::size_t at_ = 0;
  int depth_ = 0;
};

}  // namespace

Result<std::optional<double>> evaluate(std::string_view expression, const Names& names, std::string* missing) {
  return Parser(expression, names, missing).whole();
}

Result<std::uint64_t> evaluate_size(std::string_view expression, const Names& names) {
  std::string missing;
  DS_ASSIGN(const Value value, evaluate(expression, names, &missing));
  if (!value) {
    return Error(Errc::invalid_argument,
                 "'" + std::string(expression) + "': neither the page nor config.json says what '" + missing + "' is");
  }
  if (!(*value >= 0 && *value <= kWholeMax) || *value != std::floor(*value)) {
    return Error(Errc::invalid_argument,
                 "'" + std::string(expression) + "' is " + std::to_string(*value) + ", and no whole number");
  }
  return static_cast<std::uint64_t>(*value);
}

}  // namespace deltasync::exporting
