#include "export/family.hpp"

#define TOML_HEADER_ONLY 1
#define TOML_EXCEPTIONS 0
#define TOML_ENABLE_FORMATTERS 0
#include <toml++/impl/preprocessor.h>
// The parser asserts what a malformed file breaks, and a few lines on makes an error of it.
#undef TOML_ASSERT_ASSUME
#define TOML_ASSERT_ASSUME(expr) static_assert(true)
#include <toml++/toml.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

namespace deltasync::exporting {
namespace {

/// A table of the page; what is left of its keys at its end is an error.
class PageTable {
 public:
  PageTable(const toml::table& table, std::string_view file) : table_(table), file_(file) {}

  Error wrong(const toml::node& at, const std::string& what) const {
    return {Errc::invalid_argument, file_ + ":" + std::to_string(at.source().begin.line) + ": " + what};
  }
  std::string line() const { return std::to_string(table_.source().begin.line); }

  const toml::node* take(std::string_view key) {
    known_.emplace_back(key);
    return table_.get(key);
  }
  Status text(std::string_view key, std::string& out, bool required = false) {
    const toml::node* const node = take(key);
    if (node == nullptr) {
      if (required) return wrong(table_, "'" + std::string(key) + "' is missing");
      return {};
    }
    if (!node->is_string()) return wrong(*node, "'" + std::string(key) + "' is to be a text");
    out = node->ref<std::string>();
    return {};
  }
  Status flag(std::string_view key, bool& out) {
    const toml::node* const node = take(key);
    if (node == nullptr) return {};
    if (!node->is_boolean()) return wrong(*node, "'" + std::string(key) + "' is to be true or false");
    out = node->ref<bool>();
    return {};
  }
  /// A text, or a list of them.
  Status texts(std::string_view key, std::vector<std::string>& out, bool required = false) {
    const toml::node* const node = take(key);
    if (node == nullptr) {
      if (required) return wrong(table_, "'" + std::string(key) + "' is missing");
      return {};
    }
    if (node->is_string()) {
      out.push_back(node->ref<std::string>());
      return {};
    }
    if (!node->is_array()) return wrong(*node, "'" + std::string(key) + "' is to be a text or a list of texts");
    for (const toml::node& item : *node->as_array()) {
      if (!item.is_string()) return wrong(item, "'" + std::string(key) + "' is to be a list of texts");
      out.push_back(item.ref<std::string>());
    }
    return {};
  }
  /// Each table of a list of tables.
  template <class F>
  Status tables(std::string_view key, F&& each) {
    const toml::node* const node = take(key);
    if (node == nullptr) return {};
    if (!node->is_array_of_tables()) return wrong(*node, "[[" + std::string(key) + "]] is wanted");
    for (const toml::node& item : *node->as_array()) {
      PageTable table(*item.as_table(), file_);
      DS_TRY(each(table));
      DS_TRY(table.end());
    }
    return {};
  }
  Status end() const {
    for (const auto& [key, node] : table_) {
      if (std::find(known_.begin(), known_.end(), key.str()) != known_.end()) continue;
      std::string possible;
      for (const std::string& name : known_) possible += (possible.empty() ? "" : ", ") + name;
      return wrong(node, "no key '" + std::string(key.str()) + "'; there are " + possible);
    }
    return {};
  }

 private:
  const toml::table& table_;
  const std::string file_;
  std::vector<std::string> known_;
};

/// `hf` and `view`: each one text, or one for each part.
Status read_targets(PageTable& table, FamilyRow& row) {
  const toml::node* const hf = table.take("hf");
  const toml::node* const view = table.take("view");
  if (hf == nullptr) return table.wrong(*table.take("mcore"), "'hf' is missing");
  if (view != nullptr && view->is_table()) {
    for (const auto& [part, node] : *view->as_table()) {
      if (hf->is_table() && hf->as_table()->contains(part.str())) continue;
      return table.wrong(node,
                         "'view." + std::string(part.str()) + "' without an 'hf." + std::string(part.str()) + "'");
    }
  }
  const auto view_of = [&](const std::string& part) -> Result<std::string> {
    if (view == nullptr) return std::string();
    if (view->is_string()) return view->ref<std::string>();
    const toml::node* const own = view->is_table() ? view->as_table()->get(part) : nullptr;
    if (own == nullptr && view->is_table()) return std::string();
    if (own == nullptr || !own->is_string()) return table.wrong(*view, "'view' is to be a text, or one for each part");
    return own->ref<std::string>();
  };
  if (hf->is_string()) {
    DS_ASSIGN(std::string seen, view_of(""));
    row.targets.push_back({"", hf->ref<std::string>(), std::move(seen)});
    if (!row.parts.empty()) return table.wrong(*hf, "with 'parts', 'hf' says where each goes: hf.PART = \"…\"");
    return {};
  }
  if (!hf->is_table() || row.parts.empty()) return table.wrong(*hf, "'hf' is to be a text, or one for each of 'parts'");
  for (const auto& [part, node] : *hf->as_table()) {
    if (!node.is_string()) return table.wrong(node, "'hf." + std::string(part.str()) + "' is to be a text");
    const std::string name(part.str());
    DS_ASSIGN(std::string seen, view_of(name));
    row.targets.push_back({name, node.ref<std::string>(), std::move(seen)});
  }
  return {};
}

Status read_form(PageTable& table, std::string& form) {
  const toml::node* const node = table.take("alternative");
  if (node == nullptr) return {};
  if (node->is_string()) form = node->ref<std::string>();
  if (!form.empty()) return {};
  return table.wrong(
      *node, "'alternative' is to be the name of a form, the same in all rows of it: alternative = \"transposed\"");
}

Status read_row(PageTable& table, Family& family) {
  FamilyRow row;
  row.label = family.name + ":" + table.line();
  DS_TRY(table.texts("mcore", row.mcore, true));
  DS_TRY(table.text("parts", row.parts));
  DS_TRY(read_targets(table, row));
  DS_TRY(table.text("when", row.when));
  if (const toml::node* const add = table.take("add"); add != nullptr) {
    if (!add->is_number()) return table.wrong(*add, "'add' is to be a number");
    row.add = *add->value<double>();
    if (!(std::abs(row.add) <= std::numeric_limits<float>::max()))
      return table.wrong(*add, "'add' is to be a number of fp32");
  }
  DS_TRY(table.flag("optional", row.optional));
  DS_TRY(read_form(table, row.alternative));
  family.rows.push_back(std::move(row));
  return {};
}

void inherit(Family& family, const Family& from) {
  family.inherits = from.inherits;
  family.sizes.insert(from.sizes.begin(), from.sizes.end());  // those of the family itself stay
  family.renames.insert(family.renames.end(), from.renames.begin(), from.renames.end());
  family.rows.insert(family.rows.end(), from.rows.begin(), from.rows.end());
  family.constants.insert(family.constants.end(), from.constants.begin(), from.constants.end());
  family.aliases.insert(family.aliases.end(), from.aliases.begin(), from.aliases.end());
  family.ignored.insert(family.ignored.end(), from.ignored.begin(), from.ignored.end());
}

bool is_for(const Family& family, std::span<const std::string> architectures) {
  return std::find_first_of(architectures.begin(), architectures.end(), family.architectures.begin(),
                            family.architectures.end()) != architectures.end();
}

std::string joined(std::span<const std::string> names) {
  std::string out;
  for (const std::string& name : names) out += (out.empty() ? "" : ", ") + name;
  return out;
}

}  // namespace

Result<Family> parse_family(std::string_view toml, std::string_view file) {
  const toml::parse_result parsed = toml::parse(toml, std::string(file));
  if (!parsed) {
    const auto& error = parsed.error();
    return Error(Errc::invalid_argument, std::string(file) + ":" + std::to_string(error.source().begin.line) + ": " +
                                             std::string(error.description()));
  }
  Family family;
  PageTable root(parsed.table(), file);
  DS_TRY(root.text("name", family.name, true));
  DS_TRY(root.text("inherits", family.inherits));
  DS_TRY(root.texts("architectures", family.architectures));
  DS_TRY(root.texts("ignored", family.ignored));
  if (const toml::node* const sizes = root.take("sizes"); sizes != nullptr) {
    if (!sizes->is_table()) return root.wrong(*sizes, "[sizes] is wanted");
    for (const auto& [key, node] : *sizes->as_table()) {
      if (!node.is_string()) return root.wrong(node, "a size is to be a text with an expression");
      family.sizes.emplace(std::string(key.str()), node.ref<std::string>());
    }
  }
  Status read = root.tables("rows", [&](PageTable& table) { return read_row(table, family); });
  DS_TRY(std::move(read));
  read = root.tables("renames", [&](PageTable& table) -> Status {
    FamilyRename rename;
    rename.label = family.name + ":" + table.line();
    DS_TRY(table.texts("mcore", rename.mcore, true));
    DS_TRY(table.text("to", rename.to, true));
    DS_TRY(table.text("hf", rename.hf));
    DS_TRY(table.text("hf_to", rename.hf_to, !rename.hf.empty()));
    family.renames.push_back(std::move(rename));
    return {};
  });
  DS_TRY(std::move(read));
  read = root.tables("constants", [&](PageTable& table) -> Status {
    FamilyConstant constant;
    DS_TRY(table.text("hf", constant.hf, true));
    DS_TRY(table.text("when", constant.when));
    family.constants.push_back(std::move(constant));
    return {};
  });
  DS_TRY(std::move(read));
  read = root.tables("aliases", [&](PageTable& table) -> Status {
    FamilyAlias alias;
    DS_TRY(table.text("hf", alias.hf, true));
    DS_TRY(table.text("of", alias.of, true));
    DS_TRY(table.text("when", alias.when));
    family.aliases.push_back(std::move(alias));
    return {};
  });
  DS_TRY(std::move(read));
  DS_TRY(root.end());
  return family;
}

Result<Family> find_family(std::span<const Family> given, std::span<const std::string> architectures) {
  std::vector<Family> all(given.begin(), given.end());
  for (const auto& [name, text] : builtin_families()) {
    DS_ASSIGN(Family family, parse_family(text, name));
    all.push_back(std::move(family));
  }
  auto found = all.end();
  for (std::size_t i = 0; i < architectures.size() && found == all.end(); ++i) {
    found = std::find_if(all.begin(), all.end(),
                         [&](const Family& family) { return is_for(family, architectures.subspan(i, 1)); });
  }
  const std::string wanted = architectures.empty() ? "a model without architectures" : joined(architectures);
  if (found == all.end()) {
    std::vector<std::string> there;
    for (const Family& family : all)
      there.insert(there.end(), family.architectures.begin(), family.architectures.end());
    return Error(Errc::not_found, "no family page for " + wanted + "; there are pages for " + joined(there) +
                                      "; write one and give it as a table");
  }
  Family family = *found;
  std::set<std::string> seen{family.name};
  while (!family.inherits.empty()) {
    const std::string name = family.inherits;
    if (!seen.insert(name).second)
      return Error(Errc::invalid_argument, "family page " + name + " inherits from itself");
    const auto from = std::find_if(all.begin(), all.end(), [&](const Family& other) { return other.name == name; });
    if (from == all.end()) {
      return Error(Errc::invalid_argument,
                   "family page " + family.name + " inherits from " + name + ", which is not there");
    }
    inherit(family, *from);
  }
  std::vector<std::string> unused;
  for (const Family& page : given) {
    if (seen.contains(page.name) || is_for(page, architectures)) continue;
    unused.push_back(page.name + " (for " + (page.architectures.empty() ? "none" : joined(page.architectures)) + ")");
  }
  if (!unused.empty()) {
    return Error(Errc::invalid_argument, "no use for the family page " + joined(unused) + ": the model is " + wanted +
                                             "; name that in the page's architectures, or give no such page");
  }
  return family;
}

}  // namespace deltasync::exporting
