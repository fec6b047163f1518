#include "tests/integration/cluster.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

#include "agent/versions/kept_delta.hpp"
#include "base/deadline.hpp"
#include "format/mapped_file.hpp"
#include "net/endpoint.hpp"
#include "shm/side_files.hpp"
#include "tools/cli/http_get.hpp"

namespace deltasync::integration {
namespace {

std::optional<std::string> read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return std::nullopt;
  std::ostringstream text;  // not by iterators: each character takes an unoptimised build some calls
  text << in.rdbuf();
  return std::move(text).str();
}

/// 8 MiB and some: large enough that a kill finds a transfer under way.
std::vector<TensorSpec> specs() {
  auto specs = test::sample_specs();
  specs.push_back({"model.layers.0.mlp.down_proj.weight", Dtype::bf16, {1024, 4096}, {}, {512, 2048}});
  return specs;
}

}  // namespace

void AgentProcess::start(const std::vector<std::string>& more) {
  const auto ready = dir_ / (name_ + ".json");
  std::filesystem::remove(ready);
  std::vector<std::string> argv = {DELTASYNC_AGENT_BINARY,
                                   "--name",
                                   name_,
                                   "--shm-dir",
                                   dir_.string(),
                                   "--socket",
                                   socket(),
                                   "--listen",
                                   endpoint(),
                                   "--http",
                                   http_.endpoint(),
                                   "--ready-file",
                                   ready.string(),
                                   "--log-level",
                                   "error"};
  argv.insert(argv.end(), more.begin(), more.end());
  auto child = bench::Child::spawn(argv, false);
  ASSERT_TRUE(child) << child.error().to_string();
  child_ = std::make_unique<bench::Child>(std::move(child).value());
  const Deadline deadline = Deadline::after(kLimit);
  while (!std::filesystem::exists(ready)) {
    ASSERT_FALSE(deadline.passed()) << "the agent did not get ready";
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

void AgentProcess::kill() {
  if (child_ == nullptr) return;
  ::kill(child_->pid(), SIGKILL);
  child_.reset();
}

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
    const auto& header = sidecar.weights.at(0).bytes;
    std::string bytes(reinterpret_cast<const char*>(header.data()), header.size());
    for (const auto index : sidecar.weights.at(0).tensors) {
      const Tensor& tensor = model.layout->tensors()[index];
      bytes.append(reinterpret_cast<const char*>(model.half.data() + tensor.offset), tensor.bytes);
    }
    files_.write("v" + std::to_string(version) + "/model.safetensors", bytes);
    contents_[bytes] = version;
  }
  const auto published = HfModel::open(dir(0));
  ASSERT_TRUE(published.ok()) << published.error().to_string();
  layout_ = published->layout();
}

std::vector<pid_t> Cluster::attached() const {
  const net::Endpoint endpoint{"127.0.0.1", agent_.http_port()};
  const auto page = tools::http_get({endpoint, {}}, "/v1/status", Deadline::after(kLimit));
  EXPECT_TRUE(page.ok()) << page.error().to_string();
  std::vector<pid_t> pids;
  if (!page) return pids;
  const auto status = nlohmann::json::parse(*page);
  for (const auto& writer : status.at("writers")) pids.push_back(writer.at("pid").get<pid_t>());
  return pids;
}

bool Cluster::is_attached(const bench::Child& trainer) const {
  const std::vector<pid_t> pids = attached();
  return std::find(pids.begin(), pids.end(), trainer.pid()) != pids.end();
}

bench::Child Cluster::spawn(const std::vector<std::string>& argv) {
  auto child = bench::Child::spawn(argv, true);
  if (!child) {
    ADD_FAILURE() << child.error().to_string();
    std::abort();
  }
  return std::move(child).value();
}

bench::Child Cluster::publish(int first, int end, int interval_ms, double deadline_s) {
  std::vector<std::string> argv = {DELTASYNC_CLI_BINARY,
                                   "--log-level",
                                   "off",
                                   "publish",
                                   "--agent",
                                   agent_.socket(),
                                   "--interval-ms",
                                   std::to_string(interval_ms),
                                   "--deadline-s",
                                   std::to_string(deadline_s),
                                   "--json",
                                   "--model"};
  for (int version = first; version < end; ++version) argv.push_back(dir(version).string());
  return spawn(argv);
}

bench::Child Cluster::follow(const std::string& name, const AgentProcess& agent) {
  return spawn({DELTASYNC_CLI_BINARY, "--log-level", "off", "pull", "--from", agent.endpoint(), "--out",
                out(name).string(), "--follow", "--json"});
}

int Cluster::pull_once(const std::string& name, const AgentProcess& agent) {
  auto child = bench::Child::spawn(
      {DELTASYNC_CLI_BINARY, "pull", "--from", agent.endpoint(), "--out", out(name).string(), "--json"}, true);
  return child ? wait(std::move(child).value()) : -1;
}

std::string Cluster::pull_mode(const std::string& name) {
  auto child =
      spawn({DELTASYNC_CLI_BINARY, "pull", "--from", agent_.endpoint(), "--out", out(name).string(), "--json"});
  const auto line = child.read_line(Deadline::after(kLimit));
  const int code = wait(std::move(child));
  EXPECT_EQ(code, 0);
  if (!line || code != 0) return {};
  return nlohmann::json::parse(*line).at("mode").get<std::string>();
}

bool Cluster::keeps_deltas(std::size_t count) const {
  const Deadline deadline = Deadline::after(kLimit);
  while (!deadline.passed()) {
    const auto files = shm::find_side_files({files_.path(), "cluster.g1"});
    const auto whole = std::count_if(files.begin(), files.end(), [&](const shm::SideFile& file) {
      const auto mapped = MappedFile::open(file.path);
      return mapped && delta::decode_kept_delta(mapped->bytes(), *layout_);
    });
    if (static_cast<std::size_t>(whole) == count) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
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
  if (!std::filesystem::is_symlink(out(name) / "current")) return kNothing;
  // Between the look at the link and the opening of the file two commits may come, and take that version away: then
  // the link names another.
  const Deadline deadline = Deadline::after(kLimit);
  auto bytes = read_file(out(name) / "current" / "model.safetensors");
  while (!bytes && !deadline.passed()) bytes = read_file(out(name) / "current" / "model.safetensors");
  const auto found = bytes ? contents_.find(*bytes) : contents_.end();
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
