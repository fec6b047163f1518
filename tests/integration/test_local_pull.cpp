// Full updates out of the agent's memory, by receivers on its host, against a whole agent. What comes by the connection
// is the agent's to count: no byte of a half may.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include "bench/processes.hpp"
#include "format/tile_set.hpp"
#include "format/wire_local.hpp"
#include "receiver/receiver_impl.hpp"
#include "receiver/targets/target.hpp"
#include "tests/agent/agent_harness.hpp"
#include "tests/receiver/remote_memory.hpp"
#include "tests/support/held_port.hpp"
#include "tests/support/log_lines.hpp"

namespace deltasync::agent {
namespace {

constexpr const char* kPortOfChild = "DELTASYNC_TEST_LOCAL_PULL_PORT";

std::vector<TensorSpec> specs() {
  std::vector<TensorSpec> specs = test::sample_specs();
  for (int i = 0; i < 4; ++i) {
    TensorSpec s;
    s.name = "big." + std::to_string(i);
    s.dtype = Dtype::bf16;
    s.shape = {1024, 1024};
    specs.push_back(s);
  }
  TensorSpec cut;
  cut.name = "cut";
  cut.dtype = Dtype::bf16;
  cut.shape = {512, 768};
  cut.col_cuts = {100, 384};
  specs.push_back(cut);
  return specs;
}

class LocalPull : public AgentTest {
 protected:
  LocalPull() {
    model_ = test::make_model(3, specs());
    options_.core.lease_grace = std::chrono::milliseconds(20);
  }

  std::unique_ptr<receiver::ReceiverImpl> connect(std::optional<bool> local = std::nullopt,
                                                  const receiver::Tuning& tuning = {}) const {
    ReceiverOptions options;
    options.endpoint = "127.0.0.1:" + std::to_string(port());
    options.token = options_.pull.token;
    options.streams = 2;
    options.threads = 2;
    options.local = local;
    auto receiver = receiver::ReceiverImpl::connect(options, tuning, test_deadline());
    EXPECT_TRUE(receiver) << receiver.error().to_string();
    return receiver ? std::move(*receiver) : nullptr;
  }
  std::unique_ptr<receiver::ReceiverImpl> bound(std::optional<bool> local = std::nullopt,
                                                const receiver::Tuning& tuning = {}) const {
    auto receiver = connect(local, tuning);
    if (receiver) {
      EXPECT_TRUE(receiver->bind(make_host_target(model_.layout), test_deadline()));
    }
    return receiver;
  }
  PullReport pull(receiver::ReceiverImpl& receiver) const {
    auto staged = receiver.pull({}, test_deadline());
    EXPECT_TRUE(staged) << staged.error().to_string();
    if (!staged) return {};
    EXPECT_TRUE((*staged)->commit());
    return (*staged)->report();
  }
  static std::vector<std::byte> held(receiver::ReceiverImpl& receiver) {
    const auto memory = host_target_memory(*receiver.target());
    return {memory.begin(), memory.end()};
  }
  const Metrics& metrics() const { return agent_->core().metrics(); }
  std::uint64_t sent_of_halves() const { return metrics().bytes_extent + metrics().bytes_raw_tiles; }
  std::uint64_t tile_bytes() const { return bytes_of_tiles(*model_.layout, {{0, model_.layout->tile_count()}}); }

  /// By the connection, and the version is right.
  void expect_falls_back(const std::string& reason) {
    test::LogLines lines;
    const auto receiver = bound();
    ASSERT_NE(receiver, nullptr);
    const PullReport report = pull(*receiver);
    EXPECT_EQ(report.local_bytes, 0u);
    EXPECT_TRUE(held(*receiver) == model_.half);
    EXPECT_GT(sent_of_halves(), 0u);
    EXPECT_TRUE(lines.has("local_pull_failed")) << lines.text();
    EXPECT_TRUE(lines.has(reason)) << lines.text();
    EXPECT_EQ(metrics().local_pulls, 0u);

    const auto strict = bound(true);
    ASSERT_NE(strict, nullptr);
    const auto refused = strict->pull({}, test_deadline());
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code(), Errc::unsupported);
    EXPECT_NE(refused.error().message().find(reason), std::string::npos) << refused.error().to_string();
  }
};

TEST_F(LocalPull, AFullUpdateIsCopiedAndADeltaComesByTheConnection) {
  options_.pull.token = std::string(32, 't');
  start_agent();
  next_version();
  const auto receiver = bound();
  ASSERT_NE(receiver, nullptr);
  const PullReport full = pull(*receiver);
  EXPECT_EQ(full.mode, PullMode::full);
  EXPECT_EQ(full.local_bytes, tile_bytes());
  EXPECT_EQ(full.tiles, model_.layout->tile_count());
  EXPECT_LT(full.wire_bytes, tile_bytes() / 10);
  EXPECT_EQ(full.replans, 0u);
  EXPECT_TRUE(held(*receiver) == model_.half);
  EXPECT_EQ(sent_of_halves(), 0u);
  EXPECT_EQ(metrics().local_pulls, 1u);
  next_version();
  const PullReport delta = pull(*receiver);
  EXPECT_EQ(delta.mode, PullMode::delta);
  EXPECT_EQ(delta.local_bytes, 0u);
  EXPECT_TRUE(held(*receiver) == model_.half);
  EXPECT_EQ(metrics().local_pulls, 1u);
}

TEST_F(LocalPull, NeverMeansNever) {
  start_agent();
  next_version();
  const auto receiver = bound(false);
  ASSERT_NE(receiver, nullptr);
  const PullReport report = pull(*receiver);
  EXPECT_EQ(report.local_bytes, 0u);
  EXPECT_TRUE(held(*receiver) == model_.half);
  EXPECT_EQ(metrics().local_pulls, 0u);
}

TEST_F(LocalPull, SlicesAreCopiedTileByTile) {
  start_agent();
  next_version();
  const auto receiver = connect(true);
  ASSERT_NE(receiver, nullptr);
  const std::vector<Slice> slices{{"cut", Rect{0, 100, 512, 284}}, {"big.2", std::nullopt}};
  ASSERT_TRUE(receiver->bind(make_host_target(model_.layout), slices, test_deadline()));
  const PullReport report = pull(*receiver);
  EXPECT_EQ(report.local_bytes, report.full_bytes);
  EXPECT_EQ(report.full_bytes, 512u * 284 * 2 + 1024u * 1024 * 2);
  EXPECT_EQ(sent_of_halves(), 0u);
  const auto wrong = receiver->attest(test_deadline());
  ASSERT_TRUE(wrong);
  EXPECT_TRUE(wrong->empty());
}

TEST_F(LocalPull, ATargetWithoutRowsTakesTiles) {
  start_agent();
  next_version();
  const auto receiver = connect(true);
  ASSERT_NE(receiver, nullptr);
  auto* const memory = new test::RemoteMemory(model_.layout);
  ASSERT_TRUE(receiver->bind(std::unique_ptr<Target>(memory), test_deadline()));
  EXPECT_EQ(pull(*receiver).local_bytes, tile_bytes());
  EXPECT_TRUE(memory->memory() == model_.half);
  EXPECT_EQ(sent_of_halves(), 0u);
}

/// What was copied when a writer got the half back is not the version's, whatever it looks like.
TEST_F(LocalPull, AHalfThatATrainerTakesInMidCopyIsGivenUp) {
  start_agent();
  next_version();
  std::atomic<int> copies{0};
  receiver::Tuning tuning;
  tuning.after_local_copy = [&] {
    if (copies++ != 0) return;
    next_version();  // into the other half; the lease is still there
    next_version();  // into this one, whose lease is revoked
  };
  const auto receiver = bound(true, tuning);
  ASSERT_NE(receiver, nullptr);
  const PullReport report = pull(*receiver);
  EXPECT_EQ(report.version.id.number, 3u);
  EXPECT_EQ(report.replans, 1u);
  EXPECT_TRUE(held(*receiver) == model_.half);
  EXPECT_TRUE(revoked(1));
  EXPECT_EQ(sent_of_halves(), 0u);
}

/// A stray pointer writes to the served half: digests find it, and the version is the agent's as it is served then.
TEST_F(LocalPull, BytesThatAreNotTheVersionsAreNotCommitted) {
  start_agent();
  next_version();
  const ServedPtr before = served();
  const Tensor& tensor = model_.layout->tensors()[*model_.layout->find("big.1")];
  before->generation->segment->half(before->half.half)[tensor.offset + 5] ^= std::byte{0x40};
  const auto receiver = bound(true);
  ASSERT_NE(receiver, nullptr);
  const PullReport report = pull(*receiver);
  EXPECT_NE(report.root, before->root);
  EXPECT_EQ(report.root, served()->root) << "the agent has published what there is";
  model_.half[tensor.offset + 5] ^= std::byte{0x40};
  EXPECT_TRUE(held(*receiver) == model_.half);
}

TEST_F(LocalPull, AfterARestartOfTheAgent) {
  const test::HeldPort at;
  options_.pull.listen.port = at.number();
  start_agent();
  next_version();
  const auto receiver = bound(true);
  ASSERT_NE(receiver, nullptr);
  pull(*receiver);
  stop_agent();
  start_agent();
  ASSERT_TRUE(receiver->bind(make_host_target(model_.layout), test_deadline()));
  EXPECT_EQ(pull(*receiver).local_bytes, tile_bytes());
  EXPECT_TRUE(held(*receiver) == model_.half);
}

TEST_F(LocalPull, ASegmentOfAnotherLayoutIsMappedInItsPlace) {
  start_agent();
  next_version();
  const auto receiver = bound(true);
  ASSERT_NE(receiver, nullptr);
  pull(*receiver);
  writer_.reset();
  model_ = test::make_model(4, test::sample_specs());
  next_version();
  const auto again = bound(true);
  ASSERT_NE(again, nullptr);
  EXPECT_EQ(pull(*again).local_bytes, tile_bytes());
  EXPECT_TRUE(held(*again) == model_.half);
}

TEST_F(LocalPull, NoSocketThere) {
  start_agent();
  next_version();
  std::filesystem::remove(options_.trainer.socket_path);
  expect_falls_back(options_.trainer.socket_path);
}

TEST_F(LocalPull, AnotherAgentsSocket) {
  start_agent();
  next_version();
  std::filesystem::remove(options_.trainer.socket_path);
  AgentOptions other = options_;
  other.core.name = "other";
  const auto second = Agent::start(other);
  ASSERT_TRUE(second) << second.error().to_string();
  expect_falls_back("another agent serves this socket");
}

/// Answers at the agent's socket in its place.
class Impostor {
 public:
  /// `file` < 0: none is sent.
  Impostor(const std::string& path, int file) : file_(file) {
    std::filesystem::remove(path);
    sockaddr_un address;
    auto made = net::make_unix_socket(path, address);
    EXPECT_TRUE(made);
    listener_ = std::move(*made);
    EXPECT_EQ(::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    EXPECT_EQ(::listen(listener_.get(), 8), 0);
    thread_ = std::thread([this] { serve(); });
  }
  Impostor(const Impostor&) = delete;
  Impostor& operator=(const Impostor&) = delete;
  ~Impostor() {
    stop_ = true;
    thread_.join();
  }

 private:
  void serve() {
    while (!stop_) {
      UniqueFd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!fd) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        continue;
      }
      const int raw = fd.get();
      net::MessageSocket socket(std::move(fd));
      const auto asked = socket.recv(wire::kControlBytesMax, test_deadline());
      if (!asked || asked->type() != wire::Type::map_segment) continue;
      const wire::Header header = wire::make_header(wire::Type::segment, asked->header.request, {});
      send_along(raw, bytes_of(header));
    }
  }
  void send_along(int socket, ByteSpan bytes) const {
    iovec piece{const_cast<std::byte*>(bytes.data()), bytes.size()};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
    msghdr m{};
    m.msg_iov = &piece;
    m.msg_iovlen = 1;
    if (file_ >= 0) {
      m.msg_control = control.data();
      m.msg_controllen = control.size();
      cmsghdr* const along = CMSG_FIRSTHDR(&m);
      along->cmsg_level = SOL_SOCKET;
      along->cmsg_type = SCM_RIGHTS;
      along->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(along), &file_, sizeof file_);
    }
    EXPECT_EQ(::sendmsg(socket, &m, MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }

  const int file_;
  UniqueFd listener_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

class WrongDescriptor : public LocalPull {
 protected:
  void SetUp() override {
    start_agent();
    next_version();
  }
  std::filesystem::path segment() const { return served()->generation->segment->path().dir / "test.g1"; }
  UniqueFd copy_of_segment(std::uint64_t bytes, int mode = 0600) const {
    const auto copy = dir_.path() / "copy";
    std::filesystem::copy_file(segment(), copy);
    EXPECT_EQ(::truncate(copy.c_str(), static_cast<off_t>(bytes)), 0);
    EXPECT_EQ(::chmod(copy.c_str(), static_cast<mode_t>(mode)), 0);
    return UniqueFd(::open(copy.c_str(), O_RDONLY | O_CLOEXEC));
  }
  void expect(int file, const std::string& reason) {
    const Impostor impostor(options_.trainer.socket_path, file);
    expect_falls_back(reason);
  }
};

TEST_F(WrongDescriptor, None) {
  expect(-1, "the agent sent no descriptor");
}
TEST_F(WrongDescriptor, ADirectory) {
  const UniqueFd directory(::open(dir_.path().c_str(), O_RDONLY | O_CLOEXEC | O_DIRECTORY));
  expect(directory.get(), "not a regular file");
}
TEST_F(WrongDescriptor, ShorterThanAControlBlock) {
  expect(copy_of_segment(100).get(), "less than a control block");
}
TEST_F(WrongDescriptor, ShorterThanItSays) {
  expect(copy_of_segment(std::filesystem::file_size(segment()) - 4096).get(), "segment_bytes");
}
TEST_F(WrongDescriptor, OpenToOthers) {
  expect(copy_of_segment(std::filesystem::file_size(segment()), 0644).get(), "must be 0600");
}
TEST_F(WrongDescriptor, AnotherGeneration) {
  const UniqueFd copy = copy_of_segment(std::filesystem::file_size(segment()));
  writer_.reset();
  model_ = test::make_model(5, test::sample_specs());
  next_version();
  expect(copy.get(), "generation 1, not 2");
}

/// The child process of the next tests: it says that it has copied, and then stands still.
TEST(LocalPullChild, StandsStillInMidCopy) {
  const char* const port = std::getenv(kPortOfChild);
  if (port == nullptr) GTEST_SKIP() << "a part of LocalPull.ADeadOrStoppedReceiverHoldsTheTrainerUpNoLongerThanALease";
  ReceiverOptions options;
  options.endpoint = std::string("127.0.0.1:") + port;
  options.threads = 1;
  options.local = true;
  receiver::Tuning tuning;
  tuning.after_local_copy = [] {
    static const bool said = std::printf("copied\n") > 0 && std::fflush(stdout) == 0;
    if (said) ::pause();
  };
  auto receiver = receiver::ReceiverImpl::connect(options, tuning, test_deadline());
  ASSERT_TRUE(receiver) << receiver.error().to_string();
  ASSERT_TRUE((*receiver)->bind(make_host_target((*receiver)->layout()), test_deadline()));
  static_cast<void>((*receiver)->pull({}, test_deadline()));
}

TEST_F(LocalPull, ADeadOrStoppedReceiverHoldsTheTrainerUpNoLongerThanALease) {
  start_agent();
  next_version();
  const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
  std::uint64_t revocations = 0;
  for (const int signal : {SIGKILL, SIGSTOP}) {
    ASSERT_EQ(::setenv(kPortOfChild, std::to_string(port()).c_str(), 1), 0);
    auto child = bench::Child::spawn({self, "--gtest_filter=LocalPullChild.*"}, true);
    ASSERT_EQ(::unsetenv(kPortOfChild), 0);
    ASSERT_TRUE(child);
    for (;;) {
      const auto line = child->read_line(test_deadline());
      ASSERT_TRUE(line) << line.error().to_string();
      if (*line == "copied") break;
    }
    ASSERT_EQ(::kill(child->pid(), signal), 0);
    if (signal == SIGKILL) {
      EXPECT_TRUE(eventually([&] { return agent_->core().leases().list().empty(); })) << "its lease ends with it";
    } else {
      ++revocations;
    }
    next_version();
    next_version();
    EXPECT_TRUE(revoked(revocations));
    if (signal == SIGSTOP) ::kill(child->pid(), SIGKILL);
  }
  const auto receiver = bound(true);
  ASSERT_NE(receiver, nullptr);
  pull(*receiver);
  EXPECT_TRUE(held(*receiver) == model_.half);
}

}  // namespace
}  // namespace deltasync::agent
