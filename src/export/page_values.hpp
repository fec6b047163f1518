// What the names in a page's expressions are: numbers of a row's captures, the page's sizes, config.json's keys.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "deltasync/result.hpp"
#include "export/expression.hpp"
#include "export/family.hpp"
#include "export/name_pattern.hpp"

namespace deltasync::exporting {

///   - Errc::invalid_argument: no JSON object.
Result<nlohmann::json> parse_config(std::string_view config);

/// `family` is not owned. Sizes are kept once they are made: one thread at a time.
class PageValues {
 public:
  PageValues(const Family& family, nlohmann::json config);

  /// For a row: its captures come first. They are to outlive what is returned, and so is this object.
  Names with(const Captures& captures) const;
  /// Of a page's `when`; none is true.
  ///   - Errc::invalid_argument: no expression, or a name that is not there.
  Result<bool> holds(const std::string& when, const Captures& captures) const;

 private:
  using Value = Result<std::optional<double>>;
  Value value(const std::string& name, int depth) const;
  Value of_config(const std::string& name) const;
  Value of_text_model(const std::string& name) const;

  const Family& family_;
  const nlohmann::json config_;
  mutable std::map<std::string, std::optional<double>, std::less<>> known_;  ///< sizes
};

}  // namespace deltasync::exporting
