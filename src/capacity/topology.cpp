#include "capacity/topology.hpp"

#define TOML_HEADER_ONLY 1
#define TOML_EXCEPTIONS 0
#define TOML_ENABLE_FORMATTERS 0
#include <toml++/impl/preprocessor.h>
// The parser asserts what a malformed file breaks, and a few lines on makes an error of it.
#undef TOML_ASSERT_ASSUME
#define TOML_ASSERT_ASSUME(expr) static_assert(true)
#include <toml++/toml.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <optional>

namespace deltasync::capacity {
namespace {

constexpr double kHostsMax = 1e5;

/// One table of the file: its keys are taken one by one, and what is left is an error.
class Table {
 public:
  Table(const toml::table& table, std::string where, std::string_view file)
      : table_(table), where_(std::move(where)), file_(file) {}

  const std::string& where() const { return where_; }
  const toml::table& keys() const { return table_; }

  Error wrong(const toml::node* at, const std::string& what) const {
    const auto line = (at != nullptr ? at->source() : table_.source()).begin.line;
    return {Errc::invalid_argument, file_ + ":" + std::to_string(line) + ": " + where_ + what};
  }

  /// `least` <= value <= `most`. Without the key `value` stays as it is.
  Status number(const char* key, double& value, double least, double most) {
    const toml::node* const node = take(key);
    if (node == nullptr) return {};
    const std::optional<double> found = node->is_number() ? node->value<double>() : std::nullopt;
    if (!found || !(*found >= least && *found <= most)) {
      return wrong(node, std::string(key) + ": a number from " + shown(least) + " to " + shown(most) + " is wanted");
    }
    value = *found;
    return {};
  }

  Status whole(const char* key, std::uint32_t& value, double most) {
    double found = value;
    DS_TRY(number(key, found, 1, most));
    if (found != std::floor(found)) return wrong(table_.get(key), std::string(key) + ": a whole number is wanted");
    value = static_cast<std::uint32_t>(found);
    return {};
  }

  Status text(const char* key, std::string& value) {
    const toml::node* const node = take(key);
    if (node == nullptr) return {};
    if (!node->is_string()) return wrong(node, std::string(key) + ": a text is wanted");
    value = node->ref<std::string>();
    return {};
  }

  Status rate(const char* key, double& value) {
    const toml::node* const node = take(key);
    if (node == nullptr) return {};
    const auto parsed = parse_rate(node->value<std::string>().value_or("a number without its unit"));
    if (!parsed) return wrong(node, std::string(key) + ": " + parsed.error().message());
    value = *parsed;
    return {};
  }

  /// A key that is to be one of `names`.
  Status one_of(const char* key, std::string& value, const std::map<std::string, double>& names, const char* kind) {
    DS_TRY(text(key, value));
    if (!table_.contains(key) || names.contains(value)) return {};
    return wrong(table_.get(key),
                 std::string(key) + ": no '" + value + "' in [" + kind + "]; there are " + list(names));
  }

  const toml::node* take(const char* key) {
    known_.emplace_back(key);
    return table_.get(key);
  }

  /// After all keys were asked for.
  Status end() const {
    for (const auto& [key, node] : table_) {
      if (std::find(known_.begin(), known_.end(), key.str()) != known_.end()) continue;
      std::string possible;
      for (const std::string& name : known_) possible += (possible.empty() ? "" : ", ") + name;
      return wrong(&node, "no key '" + std::string(key.str()) + "'; there are " + possible);
    }
    return {};
  }

  static std::string list(const std::map<std::string, double>& names) {
    std::string out;
    for (const auto& [name, value] : names) out += (out.empty() ? "" : ", ") + name;
    return out.empty() ? "none" : out;
  }

 private:
  static std::string shown(double value) {
    std::array<char, 32> text{};
    const auto end = std::to_chars(text.data(), text.data() + text.size(), value, std::chars_format::general, 6).ptr;
    return {text.data(), end};
  }

  const toml::table& table_;
  const std::string where_;
  const std::string file_;
  std::vector<std::string> known_;
};

class Reader {
 public:
  Reader(const toml::table& root, std::string_view file) : file_(file), root_(root, "", file) {}

  Result<Topology> read() {
    DS_TRY(root_.number("mtu", out_.mtu, 576, 65'536));
    DS_TRY(read_model());
    DS_TRY(read_shared("links"));
    DS_TRY(read_shared("processors"));
    DS_TRY(read_trainers());
    DS_TRY(read_groups("relays", false));
    out_.relay_groups = static_cast<std::uint32_t>(out_.groups.size() - 1);
    DS_TRY(read_groups("engines", true));
    DS_TRY(root_.end());
    return std::move(out_);
  }

 private:
  Status read_model() {
    DS_ASSIGN(Table model, table_of("model"));
    DS_TRY(model.number("parameters", out_.model.parameters, 1, 1e15));
    DS_TRY(model.number("bytes_per_parameter", out_.model.bytes_per_parameter, 0.1, 16));
    DS_TRY(model.number("changed", out_.model.changed, 1e-9, 1));
    DS_TRY(model.number("bits_per_change", out_.model.bits_per_change, 0.1, 1000));
    if (out_.model.parameters == 0) return model.wrong(nullptr, "'parameters' is missing: how many the model has");
    return model.end();
  }

  Status read_shared(const char* kind) {
    const toml::node* const node = root_.take(kind);
    if (node == nullptr) return {};
    DS_ASSIGN(Table table, as_table(*node, kind));
    for (const auto& [key, value] : table.keys()) {
      const std::string name(key.str());
      if (kind == std::string_view("links")) {
        DS_TRY(table.rate(name.c_str(), out_.links[name]));
      } else {
        DS_TRY(table.number(name.c_str(), out_.processors[name], 0.01, 1e6));
      }
    }
    return {};
  }

  Status read_trainers() {
    DS_ASSIGN(Table table, table_of("trainers"));
    Group group;
    group.name = "trainers";
    DS_TRY(read_host(table, group));
    DS_TRY(table.end());
    out_.groups.push_back(std::move(group));
    return {};
  }

  Status read_groups(const char* kind, bool engines) {
    const toml::node* const node = root_.take(kind);
    if (node == nullptr && engines) return root_.wrong(nullptr, "[[engines]] is missing: who takes the versions");
    if (node == nullptr) return {};
    const toml::array* const tables = node->as_array();
    if (tables == nullptr || !tables->is_homogeneous(toml::node_type::table)) {
      return root_.wrong(node, std::string(kind) + ": tables are wanted; write [[" + kind + "]]");
    }
    for (const toml::node& each : *tables) {
      Table table(*each.as_table(), std::string(kind) + ": ", file_);
      DS_ASSIGN(Group group, read_taker(table, kind, engines));
      DS_TRY(table.end());
      out_.groups.push_back(std::move(group));
    }
    return {};
  }

  Result<Group> read_taker(Table& table, const char* kind, bool engines) {
    Group group;
    group.name = kind;
    DS_TRY(table.text("name", group.name));
    if (group.name.empty()) return table.wrong(table.keys().get("name"), "name: it is empty");
    for (const Group& other : out_.groups) {
      if (other.name != group.name) continue;
      return table.wrong(nullptr, "there are '" + group.name + "' already; give this group a name of its own");
    }
    DS_TRY(read_host(table, group));
    DS_TRY(table.one_of("through", group.through, out_.links, "links"));
    if (engines) DS_TRY(table.whole("hosts", group.hosts, std::min(1024.0, std::floor(kHostsMax / group.count))));
    std::map<std::string, double> sources;
    for (std::size_t i = 0; i < out_.groups.size() && !(engines && out_.is_engine(i)); ++i) {
      sources[out_.groups[i].name] = static_cast<double>(i);
    }
    group.from = static_cast<std::uint32_t>(sources.size() - 1);
    std::string from;
    DS_TRY(table.text("from", from));
    if (table.keys().contains("from")) {
      const auto found = sources.find(from);
      if (found == sources.end()) {
        return table.wrong(table.keys().get("from"),
                           "from: nobody before this is called '" + from + "'; there are " + Table::list(sources));
      }
      group.from = static_cast<std::uint32_t>(found->second);
    }
    return group;
  }

  Status read_host(Table& table, Group& group) {
    DS_TRY(table.whole("count", group.count, kHostsMax));
    DS_TRY(table.rate("link", group.link));
    DS_TRY(table.number("cores", group.cores, 0.01, 4096));
    DS_TRY(table.one_of("processor", group.processor, out_.processors, "processors"));
    DS_TRY(table.number("memory_gbps", group.memory_gbps, 0.01, 1e5));
    DS_TRY(table.number("delay_ms", group.delay_ms, 0, 1e4));
    DS_TRY(table.number("slower", group.slower, 0, 100));
    if (group.cores > 0 && !group.processor.empty()) {
      return table.wrong(table.keys().get("processor"), "cores and processor exclude each other");
    }
    if (group.cores == 0 && group.processor.empty()) {
      return table.wrong(nullptr, "'cores' is missing: of each host; or processor, a name in [processors]");
    }
    return {};
  }

  Result<Table> table_of(const char* key) {
    const toml::node* const node = root_.take(key);
    if (node == nullptr) return root_.wrong(nullptr, "[" + std::string(key) + "] is missing");
    return as_table(*node, key);
  }

  Result<Table> as_table(const toml::node& node, const char* key) {
    if (const toml::table* const table = node.as_table()) return Table(*table, std::string(key) + ": ", file_);
    return root_.wrong(&node, std::string(key) + ": a table is wanted; write [" + key + "]");
  }

  const std::string_view file_;
  Table root_;
  Topology out_;
};

}  // namespace

Result<double> parse_rate(std::string_view text) {
  constexpr std::array<std::pair<std::string_view, double>, 4> kUnits = {
      {{"kbit", 1e3}, {"mbit", 1e6}, {"gbit", 1e9}, {"tbit", 1e12}}};
  double value = 0;
  const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), value);
  const std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  const auto known = std::find_if(kUnits.begin(), kUnits.end(), [&](const auto& each) { return each.first == unit; });
  if (failed != std::errc() || known == kUnits.end() || !(value > 0 && value <= 1e9)) {
    return Error(Errc::invalid_argument,
                 "'" + std::string(text) + "' is no rate; write \"100gbit\", or kbit, mbit, tbit");
  }
  return value * known->second / 8;
}

Result<Topology> parse_topology(std::string_view text, std::string_view name) {
  const toml::parse_result parsed = toml::parse(text, name);
  if (!parsed) {
    const toml::parse_error& error = parsed.error();
    return Error(Errc::invalid_argument, std::string(name) + ":" + std::to_string(error.source().begin.line) + ": " +
                                             std::string(error.description()));
  }
  return Reader(parsed.table(), name).read();
}

}  // namespace deltasync::capacity
