#include "capacity/rates.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

namespace deltasync::capacity {
namespace {

using nlohmann::json;

constexpr double kGib = 1024.0 * 1024 * 1024;
constexpr double kSmallGib = 0.01;  ///< an end-to-end run of so little says what each version costs, whatever its size

/// One line of a benchmark.
class Line {
 public:
  Line(const json& object, std::string_view file) : object_(object), file_(file) {}

  std::string name() const { return object_.at("case").get<std::string>(); }

  Result<double> number(const char* field) const {
    const auto found = object_.find(field);
    if (found == object_.end() || !found->is_number() || !(found->get<double>() > 0)) {
      return Error(Errc::invalid_argument, std::string(file_) + ": bench " + name() + ": no '" + field +
                                               "'; run it again with this release and --json");
    }
    return found->get<double>();
  }
  Result<double> bytes() const {
    DS_ASSIGN(const double gib, number("model_gib"));
    return gib * kGib;
  }

 private:
  const json& object_;
  const std::string_view file_;
};

/// Both ends run on one machine; a plain transfer costs either as much.
Status add_full(Rates& rates, const Line& line) {
  DS_ASSIGN(const double threads, line.number("threads"));
  DS_ASSIGN(const double streams, line.number("streams"));
  DS_ASSIGN(const double plain_gbps, line.number("limit_gbps"));
  DS_ASSIGN(const double pull_gbps, line.number("pull_gbps"));
  const double cores = std::min(threads, 2 * streams);
  rates.send_s = cores / (plain_gbps * 1e9) / 2;
  rates.receive_s = std::max(rates.send_s, cores / (pull_gbps * 1e9) - rates.send_s);
  std::erase(rates.assumed, line.name());
  return {};
}

Status add_relay(Rates& rates, const Line& line) {
  DS_ASSIGN(const double bytes, line.bytes());
  DS_ASSIGN(const double threads, line.number("threads"));
  DS_ASSIGN(const double commit_s, line.number("relay_commit_s"));
  DS_ASSIGN(const double diff_s, line.number("node_diff_s"));
  rates.relay_commit_s = commit_s * threads / bytes;
  rates.relay_diff_s = diff_s * threads / bytes;
  std::erase(rates.assumed, line.name());
  return {};
}

/// A large run says what each kind of work costs, a small one only what a version costs at least.
Status add_e2e(Rates& rates, const Line& line) {
  DS_ASSIGN(const double gib, line.number("model_gib"));
  if (gib <= kSmallGib) {
    DS_ASSIGN(rates.pull_s, line.number("total_s"));
    return {};
  }
  DS_ASSIGN(const double bytes, line.bytes());
  DS_ASSIGN(const double density, line.number("density"));
  DS_ASSIGN(const double threads, line.number("threads"));
  DS_ASSIGN(const double offload_s, line.number("offload_s"));
  DS_ASSIGN(const double diff_s, line.number("commit_to_delta_s"));
  DS_ASSIGN(const double pull_s, line.number("pull_s"));
  DS_ASSIGN(const double commit_s, line.number("commit_s"));
  DS_ASSIGN(const double wire_bytes, line.number("wire_bytes"));
  const double changes = bytes / 2 * density;  // of a model of bf16
  rates.offload_s = offload_s * threads / bytes;
  rates.diff_s = diff_s * threads / bytes;
  rates.verify_s = pull_s * threads / changes;
  rates.commit_s = commit_s * threads / changes;
  rates.bits_per_change = 8 * wire_bytes / changes;
  std::erase(rates.assumed, line.name());
  return {};
}

struct Case {
  const char* name;
  Status (*add)(Rates&, const Line&);
};
constexpr Case kCases[] = {
    {"e2e", add_e2e},
    {"full", add_full},
    {"relay", add_relay},
};

}  // namespace

Rates builtin_rates() {
  Rates rates;
  rates.offload_s = 0.17e-9;
  rates.diff_s = 0.23e-9;
  rates.relay_commit_s = 0.41e-9;
  rates.relay_diff_s = 0.08e-9;
  rates.send_s = 0.14e-9;
  rates.receive_s = 0.16e-9;
  rates.verify_s = 14e-9;
  rates.commit_s = 9.3e-9;
  rates.bits_per_change = 10.73;
  rates.pull_s = 0.0011;
  for (const Case& each : kCases) rates.assumed.emplace_back(each.name);
  return rates;
}

Status add_benchmarks(Rates& rates, std::string_view text, std::string_view name) {
  std::istringstream lines{std::string(text)};
  bool any = false;
  for (std::string line; std::getline(lines, line);) {
    const json object = json::parse(line, nullptr, false);
    if (!object.is_object() || !object.contains("case") || !object.at("case").is_string()) continue;
    const Line found(object, name);
    const auto known =
        std::find_if(std::begin(kCases), std::end(kCases), [&](const Case& each) { return each.name == found.name(); });
    if (known == std::end(kCases)) continue;
    DS_TRY(known->add(rates, found));
    any = true;
  }
  if (any) return {};
  return Error(Errc::invalid_argument, std::string(name) +
                                           ": no line of a benchmark that counts here; `deltasync bench CASE --json` "
                                           "prints one, of e2e, full and relay");
}

}  // namespace deltasync::capacity
