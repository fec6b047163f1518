// deltasync-bench CASE, and the receiver process of its end-to-end cases.
#include <cstdio>
#include <filesystem>
#include <memory>

#include "bench/bench.hpp"
#include "bench/processes.hpp"
#include "tools/cli/cli.hpp"
#include "tools/cli/program.hpp"

namespace deltasync::cli {
namespace {

std::filesystem::path own_directory() {
  std::error_code failed;
  const auto exe = std::filesystem::read_symlink("/proc/self/exe", failed);
  return failed ? std::filesystem::path(".") : exe.parent_path();
}

/// Rows of equal fields, as a Markdown table.
Status print_table(const Json& rows) {
  std::string rule;
  std::string line;
  for (const auto& [key, value] : rows.at(0).items()) {
    line += "| " + key + " ";
    rule += value.is_number() ? "|---:" : "|---";
  }
  DS_TRY(print_line(line + "|"));
  DS_TRY(print_line(rule + "|"));
  for (const Json& row : rows) {
    line.clear();
    for (const auto& value : row) {
      char number[32];
      std::snprintf(number, sizeof number, "%.2f", value.is_number_float() ? value.get<double>() : 0.0);
      line += "| " +
              (value.is_string()         ? value.get<std::string>()
               : value.is_number_float() ? number
                                         : value.dump()) +
              " ";
    }
    DS_TRY(print_line(line + "|"));
  }
  return {};
}

Status run_bench(const bench::Options& options, bool json) {
  DS_ASSIGN(const Json result, bench::run(options));
  if (!json) {
    for (const auto& [key, value] : result.items()) {
      if (value.is_array()) {
        DS_TRY(print_table(value));
      } else {
        DS_TRY(print_line(key + ": " + value.dump()));
      }
    }
  }
  return json ? print_json(result) : Status();
}

std::function<Status()> setup_bench(CLI::App& app) {
  const auto options = std::make_shared<bench::Options>();
  const auto json = std::make_shared<bool>(false);
  options->bin_dir = own_directory();
  app.add_option("case", options->name,
                 "diff, codec, merge, apply, offload, export, full, colocated, packed, partial, e2e, tensors, relay, "
                 "fanout, fleet-metadata, baseline or gpu")
      ->required();
  const CLI::Option* const size =
      app.add_option("--model-gib", options->model_gib, "size of the bf16 model")->check(CLI::Range(0.001, 4096.0));
  app.add_option("--density", options->density, "fraction of elements that a step changes")
      ->check(CLI::Range(1e-6, 0.9));
  app.add_option("--threads", options->threads, "of the work and of its limit")->check(CLI::Range(1U, 256U));
  app.add_option("--streams", options->streams, "data connections of a pull")->check(CLI::Range(1U, 64U));
  app.add_option("--versions", options->versions,
                 "timed versions (e2e, tensors, relay, fanout, fleet-metadata), rounds")
      ->check(CLI::Range(1U, 1000U));
  app.add_option("--steps", options->steps, "merge: deltas of the chain")->check(CLI::Range(1U, 256U));
  app.add_option("--tensors", options->tensors, "fleet-metadata: of the layout")->check(CLI::Range(1U, 1'000'000U));
  app.add_option("--subscriptions", options->subscriptions, "fleet-metadata: of receivers at one agent")
      ->check(CLI::Range(1U, 4000U));
  app.add_flag("--master", options->master, "diff, codec, apply: the fp32 weights instead of their bf16 copies");
  app.add_option("--overlap-threads", options->overlap_threads,
                 "of the agent, to diff while a version is being offloaded")
      ->check(CLI::Range(0U, 1024U));
  app.add_flag("--compact", options->compact, "e2e: deltas in exponent classes, as for a slow link");
  auto* ca = app.add_option("--tls-ca", options->tls.ca, "full: over TLS; the receiver trusts this CA (PEM)");
  auto* cert = app.add_option("--tls-cert", options->tls.cert, "the agent's certificate, for 127.0.0.1");
  auto* key = app.add_option("--tls-key", options->tls.key, "its private key");
  ca->needs(cert)->needs(key);
  cert->needs(ca);
  key->needs(ca);
  app.add_flag("--tls-kernel,!--no-tls-kernel", options->tls.kernel, "let the kernel encrypt if it can (default)");
  app.add_flag("--fake-device", options->fake_device, "gpu: try it where there is none; figures mean nothing");
  app.add_option("--seed", options->seed, "of the generator");
  app.add_option("--from", options->from, "codec: two model directories instead of the generator; packed: one")
      ->expected(1, 2);
  app.add_option("--shm-dir", options->shm_dir, "where shared segments are made, and the file of baseline");
  app.add_option("--trace", options->trace, "record a timeline of all its processes")->type_name("FILE");
  app.add_flag("--json", *json, "one JSON object on the last line");
  return [options, json, size] {
    if (options->fake_device && size->empty()) options->model_gib = bench::kFakeModelGib;
    return run_bench(*options, *json);
  };
}

std::function<Status()> setup_bench_receiver(CLI::App& app) {
  const auto args = std::make_shared<bench::ReceiverArgs>();
  app.add_option("--from", args->endpoint)->required();
  app.add_option("--streams", args->streams);
  app.add_option("--threads", args->threads);
  app.add_option("--count", args->count);
  app.add_flag("--compact", args->compact);
  app.add_flag("--say-bound", args->say_bound);
  app.add_option("--trace", args->trace);
  return [args] {
    return with_trace(args->trace, "receiver", [&]() -> Status {
      if (bench::receiver_main(*args) == 0) {
        return {};
      }
      return Error(Errc::internal, "bench receiver failed");
    });
  };
}

int run(int argc, char** argv) {
  CLI::App app("deltasync bench: measures one case against the machine's limit", "deltasync-bench");
  const bool receiver = argc > 1 && std::string_view(argv[1]) == bench::kReceiverArg;
  const Program program{app, "deltasync bench", receiver ? setup_bench_receiver(app) : setup_bench(app)};
  return run_program(program, argc - (receiver ? 1 : 0), argv + (receiver ? 1 : 0));
}

}  // namespace
}  // namespace deltasync::cli

int main(int argc, char** argv) {
  return deltasync::cli::run(argc, argv);
}
