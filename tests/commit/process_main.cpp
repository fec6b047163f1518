// A coordinator or a rank as a process of its own, which kills or stops itself where the test says. What a rank serves
// is written to a file that all processes append to, a line before it serves and one after it has stopped.
//
//   commit_process coordinator DIRECTORY NAME PORT RANKS
//   commit_process rank DIRECTORY NAME PORT RANKS RANK memory|directory
//
// The newest version is the number in DIRECTORY/newest. A rank's target is memory, or survives it in
// DIRECTORY/held-RANK. DIRECTORY/arm-NAME names a point and a signal; the process that reaches the point removes the
// file and raises the signal.
#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "base/deadline.hpp"
#include "base/log.hpp"
#include "commit/coordinator_server.hpp"
#include "commit/participant.hpp"
#include "tests/commit/fake_receiver.hpp"

namespace {

using namespace deltasync;

commit::Points arm(const std::string& directory, const std::string& name) {
  return [path = directory + "/arm-" + name](const std::string& point) {
    std::ifstream in(path);
    std::string signal;
    std::string wanted;
    if (!(in >> signal) || !std::getline(in >> std::ws, wanted) || wanted != point) return;
    if (::unlink(path.c_str()) != 0) return;
    ::raise(signal == "KILL" ? SIGKILL : SIGSTOP);
  };
}

class Notes {
 public:
  Notes(const std::string& directory, std::string who)
      : fd_(::open((directory + "/served").c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600)),
        who_(std::move(who)) {}
  void say(const std::string& what) const {
    const std::string line = who_ + " " + what + "\n";
    if (::write(fd_.get(), line.data(), line.size()) != static_cast<ssize_t>(line.size())) std::abort();
  }

 private:
  const UniqueFd fd_;
  const std::string who_;
};

std::uint64_t number_in(const std::string& path) {
  std::ifstream in(path);
  std::uint64_t number = 0;
  return in >> number ? number : 0;
}

Version version_of(std::uint64_t number) {
  return {{1, number}, "step_" + std::to_string(number)};
}

class FileTrainer final : public commit::Trainer {
 public:
  FileTrainer(std::string newest, std::string held) : newest_(std::move(newest)), held_(std::move(held)) {}
  Version newest() const override { return version_of(number_in(newest_)); }
  void held(const std::optional<Version>& version) const override {
    if (held_.empty()) return;
    std::ofstream(held_ + ".new") << (version ? version->id.number : 0) << '\n';
    if (::rename((held_ + ".new").c_str(), held_.c_str()) != 0) std::abort();
  }

 private:
  const std::string newest_;
  const std::string held_;
};

/// Notes what it serves, and what is in the memory that it serves it from.
class NotingEngine final : public commit::Engine {
 public:
  NotingEngine(const Notes& notes, const commit::FakeReceiver& receiver) : notes_(notes), receiver_(receiver) {}
  Status pause(Deadline /*at once*/) override {
    notes_.say("pause");
    return {};
  }
  Status resume(const Version& version, Deadline /*at once*/) override {
    notes_.say("serve " + std::to_string(version.id.number) + " " + std::to_string(receiver_.memory));
    return {};
  }

 private:
  const Notes& notes_;
  const commit::FakeReceiver& receiver_;
};

int run_coordinator(const std::string& directory, const std::string& name, const std::string& port, unsigned ranks) {
  commit::CoordinatorOptions options;
  options.ranks = ranks;
  options.log = directory + "/commit.log";
  options.listen = "127.0.0.1:" + port;
  options.token = "known between ranks";
  options.prepare_limit = std::chrono::milliseconds(1500);
  options.commit_limit = std::chrono::milliseconds(1500);
  auto coordinator = commit::CoordinatorServer::start(options, arm(directory, name));
  if (!coordinator) {
    std::fprintf(stderr, "%s\n", coordinator.error().to_string().c_str());
    return 1;
  }
  std::printf("%u\n", (*coordinator)->port());
  std::fflush(stdout);
  for (;;) {
    static_cast<void>((*coordinator)->update(Want(), Deadline::after(std::chrono::seconds(60))));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

int run_rank(const std::vector<std::string>& args) {
  const std::string& directory = args[2];
  const Notes notes(directory, args[6]);
  notes.say("starts");
  const std::string kept = args[7] == "directory" ? directory + "/held-" + args[6] : "";
  const FileTrainer trainer(directory + "/newest", kept);
  const std::uint64_t held = kept.empty() ? 0 : number_in(kept);
  commit::FakeReceiver receiver(trainer, held == 0 ? std::optional<Version>() : version_of(held));
  commit::ParticipantOptions options;
  options.rank = static_cast<std::uint32_t>(std::stoul(args[6]));
  options.ranks = static_cast<std::uint32_t>(std::stoul(args[5]));
  options.coordinator = "127.0.0.1:" + args[4];
  options.token = "known between ranks";
  options.decide_limit = std::chrono::milliseconds(300);
  NotingEngine engine(notes, receiver);
  auto rank = commit::ParticipantImpl::start(options, receiver, engine, arm(directory, args[3]));
  if (!rank) return 2;
  for (bool was = false;;) {
    const bool now = (*rank)->state() == commit::RankState::in_doubt;
    if (now && !was) notes.say("in_doubt");
    was = now;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv, argv + argc);
  spdlog::set_level(spdlog::level::off);
  if (args.size() == 6 && args[1] == "coordinator") {
    return run_coordinator(args[2], args[3], args[4], static_cast<unsigned>(std::stoul(args[5])));
  }
  if (args.size() == 8 && args[1] == "rank") return run_rank(args);
  return 64;
}
