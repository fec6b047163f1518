// Peers that make the agent hold memory.
#include <sys/socket.h>
#include <unistd.h>

#include <fstream>

#include "agent/room.hpp"
#include "base/hash.hpp"
#include "tests/agent/agent_harness.hpp"

namespace deltasync::agent {
namespace {

TEST(Room, WhatIsTakenComesBackWithItsShare) {
  const Room room(100);
  auto first = room.take(60);
  ASSERT_TRUE(first);
  EXPECT_FALSE(room.take(41));
  const auto second = room.take(40);
  EXPECT_TRUE(second);
  EXPECT_EQ(room.bytes_taken(), 100u);
  Room::Share moved = *std::move(first);
  first.reset();
  EXPECT_EQ(room.bytes_taken(), 100u) << "it moved on";
  moved = Room::Share();
  EXPECT_EQ(room.bytes_taken(), 40u);
}

/// Requests, while their answers wait for more.
TEST(Room, WhatIsHeldWhileMoreIsWaitedForLeavesEnoughForThat) {
  const Room room(100);
  const auto first = room.take_first(75);
  EXPECT_TRUE(first);
  EXPECT_FALSE(room.take_first(1));
  const auto waited_for = room.take(room.waited_bytes_max());
  EXPECT_TRUE(waited_for);
  EXPECT_EQ(room.bytes_taken(), 100u);
}

TEST(Room, WhatIsOnlyKeptLeavesHalf) {
  const Room room(100);
  const auto kept = room.take_spare(50);
  EXPECT_TRUE(kept);
  EXPECT_FALSE(room.take_spare(1));
  EXPECT_TRUE(room.take(50));
}

class PeerMemory : public AgentTest {
 protected:
  /// Of this process, in which both ends are.
  static std::uint64_t resident_bytes() {
    std::ifstream in("/proc/self/statm");
    std::uint64_t pages = 0;
    std::uint64_t resident = 0;
    in >> pages >> resident;
    return resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  }
  static wire::Header header(wire::Type type, std::uint64_t payload_bytes) {
    wire::Header header;
    header.type = static_cast<std::uint16_t>(type);
    header.payload_bytes = payload_bytes;
    header.header_hash = xxh3_64(bytes_of(header).first(offsetof(wire::Header, header_hash)));
    return header;
  }
  /// As much as the agent takes, until it closes.
  static void pour(int fd, ByteSpan bytes) {
    std::size_t sent = 0;
    EXPECT_TRUE(eventually([&] {
      while (sent < bytes.size()) {
        const ssize_t n = ::send(fd, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0) return errno != EAGAIN;
        sent += static_cast<std::size_t>(n);
      }
      return true;
    }));
  }
  const Room& room() const { return agent_->core().peer_room(); }

  void use_many_tiles() {
    std::vector<TensorSpec> specs;
    for (int i = 0; i < 5000; ++i) {
      TensorSpec spec;
      spec.name = "t" + std::to_string(i);
      spec.dtype = Dtype::bf16;
      spec.shape = {8};
      specs.push_back(spec);
    }
    model_ = test::make_model(1, specs);
  }
  /// A range for each tile: as many as there can be.
  wire::GetRawTiles each_tile(std::uint64_t plan) const {
    wire::GetRawTiles wanted{plan, {}};
    for (std::uint64_t tile = 0; tile < model_.layout->tile_count(); ++tile) wanted.ranges.push_back({tile, tile + 1});
    return wanted;
  }
};

/// 30 of these took 2 GiB.
TEST_F(PeerMemory, HalfOfALargeRequestTakesNone) {
  start_agent();
  next_version();
  const std::vector<std::byte> half(32u << 20);
  std::vector<Client> peers;
  for (int i = 0; i < 30; ++i) peers.push_back(client(wire::Role::data));
  const std::uint64_t before = resident_bytes();
  for (Client& peer : peers) {
    pour(peer.socket.fd(), bytes_of(header(wire::Type::get_frames, 64u << 20)));
    pour(peer.socket.fd(), half);
  }
  const std::uint64_t after = resident_bytes();
  EXPECT_LE(after, before + (256u << 20));
  EXPECT_TRUE(eventually([&] { return agent_->pull_server().connections() == 0; }));
  EXPECT_EQ(room().bytes_taken(), 0u);
}

TEST_F(PeerMemory, ARequestIsBoundedByTheLayout) {
  start_agent();
  next_version();
  const std::uint64_t tiles = model_.layout->tile_count();
  for (const auto type : {wire::Type::get_frames, wire::Type::get_raw_tiles, wire::Type::subscribe, wire::Type::plan}) {
    auto peer = client();
    pour(peer.socket.fd(), bytes_of(header(type, std::max<std::uint64_t>(4096, 64 + 3 * tiles) + 1)));
    const auto said = peer.socket.recv(wire::kControlBytesMax, test_deadline());
    ASSERT_TRUE(said) << said.error().to_string();
    const auto error = wire::ErrorMessage::decode(said->payload);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code, Errc::protocol) << error->message;
  }
}

TEST_F(PeerMemory, TheLongestRequestThatMakesSenseIsAnswered) {
  use_many_tiles();
  start_agent();
  next_version();
  auto peer = client();
  const auto reply = peer.plan(ask());
  ASSERT_TRUE(reply);
  const wire::GetRawTiles wanted = each_tile(reply->plan);
  ASSERT_GT(wanted.encode().size(), 9000u);
  const auto frames = peer.frames(wanted);
  EXPECT_TRUE(frames) << frames.error().to_string();
  EXPECT_TRUE(eventually([&] { return room().bytes_taken() == 0; }));
}

/// Two have sent long requests, and there is no memory for both answers beside them.
TEST_F(PeerMemory, AnswersWaitForNoRequest) {
  use_many_tiles();
  options_.core.peer_bytes_max = 200u << 10;
  options_.pull.limits.room = std::chrono::hours(1);
  start_agent();
  next_version();
  auto control = client();
  const auto reply = control.plan(ask());
  ASSERT_TRUE(reply);
  const std::vector<std::byte> payload = each_tile(reply->plan).encode();
  wire::Header asked = wire::make_header(wire::Type::get_raw_tiles, 1, payload);
  std::vector<Client> peers;
  for (std::uint64_t i = 1; i <= 2; ++i) {
    peers.push_back(client(wire::Role::data));
    const std::uint64_t before = room().bytes_taken();
    pour(peers.back().socket.fd(), bytes_of(asked));
    ASSERT_TRUE(eventually([&] { return room().bytes_taken() > before; }));
  }
  for (Client& peer : peers) pour(peer.socket.fd(), payload);
  for (Client& peer : peers) {
    for (auto type = wire::Type::frame; type == wire::Type::frame;) {
      const auto part = peer.socket.recv(wire::kFrameBytesMax, test_deadline());
      ASSERT_TRUE(part) << part.error().to_string();
      type = part->type();
      ASSERT_NE(type, wire::Type::error);
    }
  }
  EXPECT_TRUE(eventually([&] { return room().bytes_taken() == 0; }));
}

/// They ask for tiles that are made for each of them, and do not read.
TEST_F(PeerMemory, AnswersThatNobodyReadsAreBounded) {
  std::vector<TensorSpec> specs(8);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    specs[i].name = "t" + std::to_string(i);
    specs[i].dtype = Dtype::bf16;
    specs[i].shape = {4096, 1024};
  }
  model_ = test::make_model(1, specs);
  options_.core.peer_bytes_max = 24u << 20;
  options_.pull.limits.room = std::chrono::milliseconds(50);
  options_.pull.limits.progress = std::chrono::hours(1);
  start_agent();
  next_version();
  auto control = client();
  const auto reply = control.plan(ask());
  ASSERT_TRUE(reply);
  const wire::GetRawTiles all{reply->plan, {{0, model_.layout->tile_count()}}};
  const std::uint64_t before = resident_bytes();
  std::vector<Client> silent;
  for (int i = 0; i < 40; ++i) {
    silent.push_back(client(wire::Role::data));
    ASSERT_TRUE(silent.back().socket.send(1, all, test_deadline()));
  }
  EXPECT_TRUE(eventually([&] { return agent_->core().metrics().memory_refused >= 20; }));
  EXPECT_LE(resident_bytes(), before + (256u << 20));
  EXPECT_LE(room().bytes_taken(), room().bytes_max());
  auto reader = client(wire::Role::data);
  const auto refused = reader.frames(all);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), Errc::timed_out) << "ask again";
  EXPECT_NE(refused.error().message().find("busy: "), std::string::npos) << refused.error().message();
  silent.clear();
  EXPECT_TRUE(eventually([&] { return room().bytes_taken() == 0; }));
  const auto frames = reader.frames(all);
  EXPECT_TRUE(frames) << frames.error().to_string();
}

}  // namespace
}  // namespace deltasync::agent
