#include "tests/integration/cluster.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <thread>

namespace deltasync::integration {
namespace {

std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

/// 8 MiB and some: large enough that a kill finds a transfer under way.
std::vector<TensorSpec> specs() {
  auto specs = test::sample_specs();
  specs.push_back({"model.layers.0.mlp.down_proj.weight", Dtype::bf16, {1024, 4096}, {}, {512, 2048}});
  return specs;
}

}  // namespace

void Cluster::SetUp() {
  write_versions();
  start_agent();
}

void Cluster::TearDown() {
  kill_agent();
}

void Cluster::write_versions() {
  auto model = test::make_model(7, specs());
  const Sidecar sidecar = make_sidecar(*model.layout);
  for (int version = 0; version < kVersions; ++version) {
    if (version > 0) test::mutate(model.half, *model.layout, 0.02, static_cast<std::uint64_t>(version));
    const auto& header = sidecar.weights.at(0).header;
    std::string bytes(reinterpret_cast<const char*>(header.data()), header.size());
    for (const auto index : sidecar.weights.at(0).tensors) {
      const Tensor& tensor = model.layout->tensors()[index];
      bytes.append(reinterpret_cast<const char*>(model.half.data() + tensor.offset), tensor.bytes);
    }
    files_.write("v" + std::to_string(version) + "/model.safetensors", bytes);
    contents_[bytes] = version;
  }
}

void Cluster::start_agent(const std::vector<std::string>& more) {
  const auto ready = files_.path() / "ready.json";
  std::filesystem::remove(ready);
  std::vector<std::string> argv = {DELTASYNC_AGENT_BINARY,
                                   "--name",
                                   "cluster",
                                   "--shm-dir",
                                   files_.path().string(),
                                   "--socket",
                                   socket(),
                                   "--listen",
                                   "127.0.0.1:" + std::to_string(port_),
                                   "--http",
                                   "off",
                                   "--ready-file",
                                   ready.string(),
                                   "--log-level",
                                   "error"};
  argv.insert(argv.end(), more.begin(), more.end());
  auto child = bench::Child::spawn(argv, false);
  ASSERT_TRUE(child) << child.error().to_string();
  agent_ = std::make_unique<bench::Child>(std::move(child).value());
  const Deadline deadline = Deadline::after(kLimit);
  while (!std::filesystem::exists(ready)) {
    ASSERT_FALSE(deadline.passed()) << "the agent did not get ready";
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  std::ifstream in(ready);
  port_ = nlohmann::json::parse(in).at("port").get<unsigned>();  // a restarted agent is found at the same place
}

void Cluster::kill_agent() {
  if (agent_ == nullptr) return;
  ::kill(agent_->pid(), SIGKILL);
  agent_.reset();
}

bench::Child Cluster::publish(int first, int end, int interval_ms, double deadline_s) {
  std::vector<std::string> argv = {DELTASYNC_CLI_BINARY,
                                   "--log-level",
                                   "off",
                                   "publish",
                                   "--agent",
                                   socket(),
                                   "--interval-ms",
                                   std::to_string(interval_ms),
                                   "--deadline-s",
                                   std::to_string(deadline_s),
                                   "--json",
                                   "--model"};
  for (int version = first; version < end; ++version) argv.push_back(dir(version).string());
  auto child = bench::Child::spawn(argv, true);
  if (!child) {
    ADD_FAILURE() << child.error().to_string();
    std::abort();
  }
  return std::move(child).value();
}

bench::Child Cluster::follow(const std::string& name) {
  auto child =
      bench::Child::spawn({DELTASYNC_CLI_BINARY, "--log-level", "off", "pull", "--from",
                           "127.0.0.1:" + std::to_string(port_), "--out", out(name).string(), "--follow", "--json"},
                          true);
  if (!child) {
    ADD_FAILURE() << child.error().to_string();
    std::abort();
  }
  return std::move(child).value();
}

int Cluster::pull_once(const std::string& name) {
  auto child = bench::Child::spawn({DELTASYNC_CLI_BINARY, "pull", "--from", "127.0.0.1:" + std::to_string(port_),
                                    "--out", out(name).string(), "--json"},
                                   true);
  return child ? wait(std::move(child).value()) : -1;
}

int Cluster::wait(bench::Child child) {
  const Deadline deadline = Deadline::after(kLimit);
  while (!deadline.passed()) {
    siginfo_t info{};  // WNOWAIT: the child stays for its owner to reap
    if (::waitid(P_PID, static_cast<id_t>(child.pid()), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0) {
      return info.si_code == CLD_EXITED ? info.si_status : -1;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return -1;
}

int Cluster::current(const std::string& name) const {
  const auto path = out(name) / "current" / "model.safetensors";
  std::error_code missing;
  if (!std::filesystem::exists(path, missing)) return kNothing;
  const auto found = contents_.find(read_file(path));
  return found == contents_.end() ? kTorn : found->second;
}

bool Cluster::becomes(const std::string& name, int version) const {
  const Deadline deadline = Deadline::after(kLimit);
  while (!deadline.passed()) {
    const int now = current(name);
    if (now == version) return true;
    if (now == kTorn) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

}  // namespace deltasync::integration
