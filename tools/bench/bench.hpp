// `deltasync bench CASE`: each case measures the machine's limit and the work in one run and returns one JSON object.
// The head of each case_*.cpp says what it measures.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "deltasync/result.hpp"
#include "deltasync/tls.hpp"

namespace deltasync::bench {

/// The tests' device has little memory, and plays each thread of a kernel.
inline constexpr double kFakeModelGib = 0.02;
inline constexpr auto kCaseLimit = std::chrono::seconds(120);  ///< of any one wait of a case
/// The first argument of the receiver process that e2e and tensors start.
inline constexpr const char* kReceiverArg = "receiver";

struct Options {
  std::string name;               ///< the case
  double model_gib = 2.0;         ///< bytes of the bf16 model, in GiB; with fake_device the CLI says kFakeModelGib
  double density = 0.01;          ///< fraction of elements that one step changes
  unsigned threads = 2;           ///< of the work and of its limit
  unsigned streams = 4;           ///< data connections of a pull and of its limit
  unsigned versions = 5;          ///< timed versions or rounds wanted; rounds_of() is what is run
  unsigned steps = 8;             ///< merge: deltas of the chain
  unsigned tensors = 1'000'000;   ///< fleet-metadata: of the layout
  unsigned subscriptions = 1000;  ///< fleet-metadata: of the agent
  bool master = false;            ///< diff, codec, apply: the fp32 weights themselves instead of their bf16 copies
  unsigned overlap_threads = 2;   ///< of the agent, to diff while a version is still being offloaded
  bool compact = false;           ///< e2e: over the wire in exponent classes, as over a slow link
  TlsOptions tls;                 ///< full: cert and key are the agent's, ca the receiver's; none: no TLS
  bool fake_device = false;       ///< gpu: on the tests' device, to try it; its figures say nothing
  std::uint64_t seed = 1;
  std::vector<std::filesystem::path> from;  ///< codec: two model directories, packed: one, instead of the generator
  std::filesystem::path shm_dir = "/dev/shm";
  std::filesystem::path trace;        ///< timeline of all processes; empty: none
  std::filesystem::path trace_parts;  ///< run()'s own: the directory for what each of them records
  std::filesystem::path bin_dir;      ///< where deltasync-agent lies; filled in by the CLI
};

using Json = nlohmann::ordered_json;

Result<Json> run_diff(const Options& options);
Result<Json> run_codec(const Options& options);
Result<Json> run_merge(const Options& options);
Result<Json> run_apply(const Options& options);
Result<Json> run_copy(const Options& options);
Result<Json> run_offload(const Options& options);
Result<Json> run_export(const Options& options);
Result<Json> run_full(const Options& options);
Result<Json> run_colocated(const Options& options);
Result<Json> run_packed(const Options& options);
Result<Json> run_gpu(const Options& options);
Result<Json> run_partial(const Options& options);
Result<Json> run_e2e(const Options& options);
Result<Json> run_tensors(const Options& options);
Result<Json> run_relay(const Options& options);
Result<Json> run_fanout(const Options& options);
Result<Json> run_fleet_metadata(const Options& options);
Result<Json> run_baseline(const Options& options);

/// Dispatches on options.name; invalid_argument lists the cases.
Result<Json> run(const Options& options);

/// Where a process of the benchmark records its part of the timeline; empty if none is.
std::filesystem::path trace_part(const Options& options, const std::string& process);

/// Timed versions of e2e and tensors, rounds of the other cases: at least 5.
inline unsigned rounds_of(const Options& options) {
  return std::max(5U, options.versions);
}

/// Seconds since construction.
class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

/// Middle value (mean of the middle two); 0 for none.
double median(std::vector<double> values);

}  // namespace deltasync::bench
