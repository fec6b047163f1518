// The program itself: options, ready file, signals, exit codes.
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string_view>

#include "base/cpu_affinity.hpp"
#include "base/process.hpp"
#include "tests/agent/agent_harness.hpp"
#include "tests/support/without_threads.hpp"

extern char** environ;

namespace deltasync::agent {
namespace {

class AgentProcess : public ::testing::Test {
 protected:
  ~AgentProcess() override {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
  }

  void spawn(std::vector<std::string> more) {
    std::vector<std::string> args = {DELTASYNC_AGENT_BINARY, "--name",       "proc",          "--shm-dir",
                                     dir_.path().string(),   "--ready-file", ready().string()};
    if (!socket_.empty()) args.insert(args.end(), {"--socket", (dir_.path() / socket_).string()});
    if (insecure_) args.push_back("--insecure");
    args.insert(args.end(), more.begin(), more.end());
    std::vector<char*> argv;
    for (auto& arg : args) argv.push_back(arg.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 2, (dir_.path() / "log").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
    ASSERT_EQ(::posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), environ), 0);
    posix_spawn_file_actions_destroy(&actions);
  }
  std::filesystem::path ready() const { return dir_.path() / "ready.json"; }
  std::string log() const {
    std::ifstream in(dir_.path() / "log");
    std::stringstream text;
    text << in.rdbuf();
    return text.str();
  }
  nlohmann::json wait_ready() {
    EXPECT_TRUE(eventually([&] { return std::filesystem::exists(ready()); })) << log();
    std::ifstream in(ready());
    return nlohmann::json::parse(in, nullptr, false);
  }
  /// -1 if a signal ended it or it did not end at all.
  int wait_exit() {
    int status = 0;
    if (!eventually([&] { return ::waitpid(pid_, &status, WNOHANG) == pid_; })) return -1;
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

  test::TempDir dir_;
  std::string socket_ = "s";
  bool insecure_ = true;
  pid_t pid_ = -1;
};

TEST_F(AgentProcess, SigtermEndsItCleanlyAndLeavesTheSegment) {
  for (const int signal : {SIGTERM, SIGINT}) {
    spawn({});
    const auto json = wait_ready();
    ASSERT_EQ(json["pid"], pid_) << log();
    const auto model = test::make_model(1);
    WriterOptions options;
    options.agent_socket = json["socket"];
    auto writer = Writer::attach(model.layout, make_sidecar(*model.layout), options, test_deadline());
    ASSERT_TRUE(writer) << writer.error().to_string();
    std::vector<std::pair<std::string, Source>> tensors;
    for (const Tensor& tensor : model.layout->tensors()) {
      tensors.emplace_back(tensor.spec.name, Source{model.half.data() + tensor.offset});
    }
    const Version version{{make_epoch(), 1}, ""};
    ASSERT_TRUE((*writer)->offload(version, tensors, test_deadline()));
    ASSERT_TRUE((*writer)->wait_ready(version.id, test_deadline()));
    // Conversations in every state: idle, and waiting for a version.
    auto idle = Client::connect(json["port"], wire::Role::control);
    auto waiting = Client::connect(json["port"], wire::Role::control);
    ASSERT_TRUE(idle && waiting);
    wire::PlanRequest plan;
    plan.layout = model.layout->digest();
    plan.want = wire::WantKind::number;
    plan.number = 99;
    plan.wait_ms = 3'600'000;
    ASSERT_TRUE(waiting->socket.send(1, plan, test_deadline()));
    ::kill(pid_, signal);
    EXPECT_EQ(wait_exit(), 0) << log();
    EXPECT_TRUE(std::filesystem::exists(dir_.path() / "proc.g1"));
    EXPECT_FALSE(std::filesystem::exists(ready()));
    EXPECT_FALSE(std::filesystem::exists(dir_.path() / "s"));
    EXPECT_EQ(log().find("abandoned"), std::string::npos) << log();
  }
}

/// Of all its threads, what they may run on.
std::set<std::string> cores_of(pid_t pid) {
  std::set<std::string> lists;
  for (const auto& task : std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/task")) {
    std::ifstream status(task.path() / "status");
    constexpr std::string_view kField = "Cpus_allowed_list:\t";
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with(kField)) lists.insert(line.substr(kField.size()));
    }
  }
  return lists;
}

TEST_F(AgentProcess, AllThreadsStayOnTheCoresThatItIsGiven) {
  const CpuList allowed = allowed_cpus().value();
  const std::string last = std::to_string(allowed.back());
  spawn({"--cores", last, "--remove-segment-on-exit"});
  wait_ready();
  EXPECT_EQ(cores_of(pid_), std::set<std::string>{last});
  ::kill(pid_, SIGTERM);
  EXPECT_EQ(wait_exit(), 0) << log();
}

TEST_F(AgentProcess, CoresThatCannotBeHadAreNamed) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"--cores", "0-8191"}, "--cores: core "},
      {{"--cores", "zero"}, "--cores: 'zero' is no list"},
  };
  for (const auto& [arguments, words] : cases) {
    spawn(arguments);
    EXPECT_EQ(wait_exit(), 1) << log();
    EXPECT_NE(log().find(words), std::string::npos) << log();
    EXPECT_FALSE(std::filesystem::exists(ready()));
  }
}

TEST_F(AgentProcess, TheSegmentIsRemovedOnRequest) {
  spawn({"--remove-segment-on-exit"});
  const auto json = wait_ready();
  const auto model = test::make_model(1);
  WriterOptions options;
  options.agent_socket = json["socket"];
  ASSERT_TRUE(Writer::attach(model.layout, make_sidecar(*model.layout), options, test_deadline()));
  EXPECT_TRUE(std::filesystem::exists(dir_.path() / "proc.g1"));
  ::kill(pid_, SIGTERM);
  EXPECT_EQ(wait_exit(), 0) << log();
  EXPECT_FALSE(std::filesystem::exists(dir_.path() / "proc.g1"));
}

TEST_F(AgentProcess, AKilledAgentsNameIsFreeAgain) {
  spawn({});
  wait_ready();
  ::kill(pid_, SIGKILL);
  EXPECT_EQ(wait_exit(), -1);
  std::filesystem::remove(ready());
  spawn({});
  EXPECT_EQ(wait_ready()["pid"], pid_) << log();
}

TEST_F(AgentProcess, WrongUsageIsOne) {
  spawn({"--delta-form", "zip"});
  EXPECT_EQ(wait_exit(), 1);
  spawn({"--listen", "nowhere"});
  EXPECT_EQ(wait_exit(), 1);
  EXPECT_NE(log().find("nowhere"), std::string::npos) << log();
  spawn({"--no-such-option"});
  EXPECT_EQ(wait_exit(), 1);
}

TEST_F(AgentProcess, ASecondAgentIsTwoAndNamesTheFirst) {
  spawn({});
  wait_ready();
  const pid_t first = pid_;
  socket_ = "s2";
  spawn({});
  EXPECT_EQ(wait_exit(), 2);
  EXPECT_NE(log().find(std::to_string(first)), std::string::npos) << log();
  pid_ = first;
}

TEST_F(AgentProcess, AccessIsThree) {
  spawn({"--listen", "0.0.0.0:0"});
  EXPECT_EQ(wait_exit(), 3);
  insecure_ = false;  // one that it would make itself is not for other hosts
  spawn({"--listen", "0.0.0.0:0"});
  EXPECT_EQ(wait_exit(), 3);
  dir_.write("token", std::string_view("a secret of two\n"));
  ::chmod((dir_.path() / "token").c_str(), 0644);
  spawn({"--listen", "0.0.0.0:0", "--token-file", (dir_.path() / "token").string()});
  EXPECT_EQ(wait_exit(), 3);
  EXPECT_NE(log().find("token"), std::string::npos);
  ::chmod((dir_.path() / "token").c_str(), 0600);
  spawn({"--listen", "0.0.0.0:0", "--token-file", (dir_.path() / "token").string()});
  EXPECT_EQ(wait_exit(), 1);  // too short
  EXPECT_NE(log().find("at least 16"), std::string::npos) << log();
  dir_.write("token", std::string_view("a secret of three\n"));
  spawn({"--listen", "0.0.0.0:0", "--token-file", (dir_.path() / "token").string()});
  const auto json = wait_ready();
  EXPECT_TRUE(Client::connect(json["port"], wire::Role::control, "a secret of three")) << log();
  EXPECT_FALSE(Client::connect(json["port"], wire::Role::control, "A secret of three"));
}

TEST_F(AgentProcess, ByDefaultATokenAndTheSocketLieInADirectoryOfItsUserAlone) {
  const auto user_dir = dir_.path() / "user";
  std::filesystem::create_directory(user_dir);
  ::setenv("XDG_RUNTIME_DIR", user_dir.c_str(), 1);
  socket_.clear();
  insecure_ = false;
  spawn({});
  ::unsetenv("XDG_RUNTIME_DIR");
  const auto json = wait_ready();
  ASSERT_TRUE(json.is_object()) << log();
  EXPECT_EQ(json["socket"], (user_dir / "deltasync" / "proc.sock").string());
  std::string token;
  for (const auto& entry : std::filesystem::directory_iterator(user_dir / "deltasync")) {
    if (entry.path().extension() == ".token") token = net::read_token_file(entry.path()).value();
  }
  EXPECT_TRUE(Client::connect(json["port"], wire::Role::control, token)) << log();
  EXPECT_EQ(Client::connect(json["port"], wire::Role::control).error().code(), Errc::unauthenticated);
  ::kill(pid_, SIGTERM);
  EXPECT_EQ(wait_exit(), 0);
  EXPECT_TRUE(std::filesystem::is_empty(user_dir / "deltasync"));
}

/// An agent that a limit of threads binds, as it does not bind root: the agent runs as nobody, out of a copy of the
/// program, since nobody may not be allowed to enter the build's directory.
class AgentWithoutThreads : public AgentProcess {
 protected:
  void SetUp() override {
#ifdef __SANITIZE_THREAD__
    GTEST_SKIP() << "ThreadSanitizer starts threads of its own";
#endif
    if (::geteuid() != 0) GTEST_SKIP() << "changing to another user needs root";
    ::chmod(dir_.path().c_str(), 0777);
    std::filesystem::copy_file(DELTASYNC_AGENT_BINARY, program());
    ::chmod(program().c_str(), 0755);
    const int probe = test::run_without_threads([this] {
      return ::access(program().c_str(), X_OK) == 0 && ::access(dir_.path().c_str(), W_OK) == 0 ? 0 : kOutOfReach;
    });
    if (probe == test::kThreadsNotLimited) {
      GTEST_SKIP() << "threads cannot be limited: one user only, or RLIMIT_NPROC binds nobody here";
    }
    if (probe == kOutOfReach) GTEST_SKIP() << "user 65534 cannot reach " << dir_.path() << ": set TMPDIR";
    ASSERT_EQ(probe, 0);
  }
  static constexpr int kOutOfReach = 78;
  std::string program() const {
    return dir_.path() / "agent";
  }
  /// `threads`: of all processes of this user.
  void spawn_as_nobody(rlim_t threads) {
    const char* before = std::getenv("ASAN_OPTIONS");  // a leak check at the exit would need a thread
    const std::string sanitizer = std::string(before != nullptr ? before : "") + ":detect_leaks=0";
    std::vector<std::string> args = {
        program(),      "--name", "proc",      "--shm-dir", dir_.path(), "--socket", dir_.path() / socket_,
        "--ready-file", ready(),  "--insecure"};
    std::vector<char*> argv;
    for (auto& arg : args) argv.push_back(arg.data());
    argv.push_back(nullptr);
    const std::string log_path = dir_.path() / "log";
    ::unlink(log_path.c_str());
    pid_ = ::fork();
    if (pid_ != 0) return;
    rlimit limit{};
    if (::getrlimit(RLIMIT_NPROC, &limit) != 0) ::_exit(90);
    limit.rlim_cur = std::min(threads, limit.rlim_max);
    const int log_fd = ::open(log_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (log_fd < 0 || ::dup2(log_fd, 2) < 0 || ::setenv("ASAN_OPTIONS", sanitizer.c_str(), 1) != 0 ||
        ::setresuid(65534, 65534, 65534) != 0 || ::setrlimit(RLIMIT_NPROC, &limit) != 0) {
      ::_exit(90);
    }
    ::execv(argv[0], argv.data());
    ::_exit(91);
  }
};

TEST_F(AgentWithoutThreads, WithoutTheOneThatGuardsItsExitItDoesNotStart) {
  spawn_as_nobody(0);
  EXPECT_EQ(wait_exit(), 5);
  EXPECT_NE(log().find("guards the exit"), std::string::npos) << log();
  EXPECT_FALSE(std::filesystem::exists(dir_.path() / socket_));
}

TEST_F(AgentWithoutThreads, WhicheverIsMissingAStartFailsAndAnExitNeedsNone) {
  int failed = 0;
  for (rlim_t threads = 1; threads < 100; ++threads) {
    spawn_as_nobody(threads);
    int status = 0;
    ASSERT_TRUE(
        eventually([&] { return std::filesystem::exists(ready()) || ::waitpid(pid_, &status, WNOHANG) == pid_; }));
    if (std::filesystem::exists(ready())) break;
    pid_ = -1;
    ++failed;
    ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 5) << "status " << status << "\n" << log();
    EXPECT_NE(log().find("agent_failed"), std::string::npos) << log();
    EXPECT_FALSE(std::filesystem::exists(dir_.path() / socket_));
  }
  EXPECT_GT(failed, 3);
  ASSERT_EQ(wait_ready()["pid"], pid_) << log();
  // It runs with as many as there may be: not one more can be started for its end.
  ::kill(pid_, SIGTERM);
  EXPECT_EQ(wait_exit(), 0) << log();
  EXPECT_EQ(log().find("abandoned"), std::string::npos) << log();
}

TEST_F(AgentProcess, HelpTellsExitCodes) {
  spawn({"--help"});
  EXPECT_EQ(wait_exit(), 0);
}

}  // namespace
}  // namespace deltasync::agent
