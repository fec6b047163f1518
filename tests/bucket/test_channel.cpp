// Trainer processes and an engine's process over a bucket channel.
#include <gmock/gmock-matchers.h>

#include "tests/bucket/raw_peers.hpp"

namespace deltasync::test {
namespace {

using testing::HasSubstr;

TEST_F(BucketChannel, VersionsOfAnotherProcessAreBitForBitTheEngines) {
  std::vector<std::vector<std::byte>> halves{model_.half};
  for (std::uint64_t v = 1; v < 4; ++v) {
    halves.push_back(halves.back());
    mutate(halves.back(), *model_.layout, 0.1, v);
  }
  Child trainer([&] {
    auto sender = open();
    if (!sender) return 1;
    for (std::uint64_t v = 0; v < halves.size(); ++v) {
      if (!send(**sender, halves[v], v + 1)) return 2;
    }
    return 0;
  });
  const auto receiver = connect();
  ASSERT_TRUE(receiver.ok()) << receiver.error().message();
  EXPECT_EQ((*receiver)->layout()->digest(), model_.layout->digest());
  for (std::uint64_t v = 0; v < halves.size(); ++v) {
    const auto staged = (*receiver)->pull({.newer = true}, in_a_minute());
    ASSERT_TRUE(staged.ok()) << staged.error().message();
    if (v > 0) {
      EXPECT_TRUE(has(**receiver, halves[v - 1])) << "staged beside what is live";
    }
    ASSERT_TRUE((*staged)->commit(in_a_minute()).ok());
    EXPECT_TRUE(has(**receiver, halves[v]));
    const PullReport& report = (*staged)->report();
    EXPECT_EQ(report.version, version_of(v + 1));
    EXPECT_EQ(report.mode, PullMode::full);
    EXPECT_EQ(report.tiles, model_.layout->tile_count());
    EXPECT_EQ(report.local_bytes, model_.layout->model_bytes());
    EXPECT_EQ(report.wire_bytes, report.metadata_bytes);
    EXPECT_LT(report.metadata_bytes, model_.layout->model_bytes() / 100);
  }
  EXPECT_TRUE((*receiver)->attest(in_a_minute()).value().empty());
  EXPECT_EQ((*receiver)->lag().versions, std::uint64_t{0});
  EXPECT_EQ(trainer.wait(), 0);
}

TEST_F(BucketChannel, ThreeRanksTogetherSendOneVersion) {
  const auto count = static_cast<std::uint64_t>(model_.layout->tensors().size());
  const std::vector<std::vector<wire::TileRange>> shares{{{0, 3}, {7, 8}}, {{3, 7}}, {{8, count}}};
  std::vector<std::unique_ptr<Child>> ranks;
  for (std::uint32_t rank = 0; rank < shares.size(); ++rank) {
    ranks.push_back(std::make_unique<Child>([&, rank] {
      auto sender = open({.rank = rank, .ranks = 3, .tensors = shares[rank]});
      if (!sender) return 1;
      for (std::uint64_t v = 1; v < 3; ++v) {
        if (!send(**sender, model_.half, v)) return 2;
      }
      return 0;
    }));
  }
  const auto receiver = connect();
  ASSERT_TRUE(receiver.ok()) << receiver.error().message();
  for (std::uint64_t v = 1; v < 3; ++v) {
    const Status taken = take(**receiver, v);
    ASSERT_TRUE(taken.ok()) << taken.error().message();
    EXPECT_TRUE(has(**receiver, model_.half));
  }
  for (const auto& rank : ranks) EXPECT_EQ(rank->wait(), 0);
}

TEST_F(BucketChannel, RanksThatLeaveATensorOutOrSendItTwiceAreRefusedByItsName) {
  const auto count = static_cast<std::uint64_t>(model_.layout->tensors().size());
  const auto refusal = [&](std::vector<wire::TileRange> first, std::vector<wire::TileRange> second) {
    std::vector<std::thread> ranks;
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      ranks.emplace_back([&, rank] {
        auto sender = open({.rank = rank, .ranks = 2, .tensors = rank == 0 ? first : second});
        ASSERT_TRUE(sender.ok()) << sender.error().message();
        EXPECT_EQ(send(**sender, model_.half, 1).error().code(), Errc::coverage);
      });
    }
    const auto receiver = connect();
    const Status taken = take(**receiver, 1);
    for (std::thread& rank : ranks) rank.join();
    return taken.ok() ? std::string("taken") : taken.error().to_string();
  };
  const std::string& name = model_.layout->tensors()[3].spec.name;
  EXPECT_THAT(refusal({{0, 3}}, {{4, count}}), HasSubstr("coverage: no rank sends " + name));
  EXPECT_THAT(refusal({{0, 4}}, {{3, count}}), HasSubstr("coverage: " + name + " is sent by rank "));
}

/// The order, shown by what an engine that does not answer sees.
TEST_F(BucketChannel, AChunkIsIssuedBeforeTheAnswerToTheOneBeforeIsAwaited) {
  RawEngine engine(path());
  std::thread trainer([&] {
    auto sender = open();
    ASSERT_TRUE(sender.ok()) << sender.error().message();
    const Status sent = send(**sender, model_.half, 1);
    EXPECT_TRUE(sent.ok()) << sent.error().message();
  });
  engine.accept();
  engine.answer(engine.next());
  const auto memory = bucket::open_host_buckets(engine.socket.take_file(), kBucketBytes).value();
  engine.answer(engine.next());
  net::Message unanswered = engine.next();
  ASSERT_EQ(unanswered.type(), wire::Type::bucket_chunk);
  int pairs = 0;
  std::uint64_t tiles = wire::BucketChunk::decode(unanswered.payload).value().digests.size();
  while (tiles < model_.layout->tile_count()) {
    // The next one is here although this one has no answer; and its half is as it was, since that is what it has.
    net::Message message = engine.next();
    ASSERT_EQ(message.type(), wire::Type::bucket_chunk);
    ++pairs;
    const auto half = wire::BucketChunk::decode(unanswered.payload).value().half;
    const wire::BucketChunk chunk = wire::BucketChunk::decode(message.payload).value();
    EXPECT_NE(chunk.half, half);
    tiles += chunk.digests.size();
    const std::vector<std::byte> before(memory->half(half).begin(), memory->half(half).end());
    EXPECT_FALSE(engine.speaks(std::chrono::milliseconds(20))) << "a third one, while two have no answer";
    EXPECT_TRUE(std::equal(before.begin(), before.end(), memory->half(half).begin()));
    engine.answer(unanswered);
    unanswered = std::move(message);
  }
  EXPECT_FALSE(engine.speaks(std::chrono::milliseconds(20))) << "the end, before all chunks have their answer";
  engine.answer(unanswered);
  unanswered = engine.next();
  ASSERT_EQ(unanswered.type(), wire::Type::bucket_finish);
  engine.answer(unanswered);
  EXPECT_GE(pairs, 3);
  trainer.join();
}

TEST_F(BucketChannel, ATrainerThatIsKilledAmidAVersionLeavesTheOneBefore) {
  std::vector<std::byte> next = model_.half;
  mutate(next, *model_.layout, 0.2, 5);
  Child first([&] {
    auto sender = open();
    if (!sender || !send(**sender, model_.half, 1)) return 1;
    if (!(*sender)->begin(version_of(2), soon())) return 2;
    const auto tensors = model_.layout->tensors();
    for (std::uint32_t t = 0; t + 1 < tensors.size(); ++t) {
      if (!(*sender)->put(t, ByteSpan(next).subspan(tensors[t].offset, tensors[t].bytes), soon())) return 3;
    }
    ::raise(SIGKILL);
    return 4;
  });
  const auto receiver = connect();
  ASSERT_TRUE(take(**receiver, 1).ok());
  const auto torn = (*receiver)->pull({.number = 2}, in_a_minute());
  ASSERT_FALSE(torn.ok());
  EXPECT_EQ(torn.error().code(), Errc::connection) << torn.error().message();
  EXPECT_THAT(torn.error().message(), HasSubstr("rank 0 (trainer)"));
  EXPECT_EQ(first.wait(), -SIGKILL);
  EXPECT_EQ((*receiver)->current(), version_of(1));
  EXPECT_TRUE(has(**receiver, model_.half));
  EXPECT_FALSE((*receiver)->lag().last_error.empty());
  Child second([&] {
    auto sender = open();
    return sender && send(**sender, next, 2) ? 0 : 1;
  });
  const Status taken = take(**receiver, 2);
  ASSERT_TRUE(taken.ok()) << taken.error().message();
  EXPECT_TRUE(has(**receiver, next));
  EXPECT_EQ(second.wait(), 0);
}

TEST_F(BucketChannel, ATrainerThatStandsStillEndsThePullAtItsDeadline) {
  Signal amid;
  Child trainer([&] {
    auto sender = open();
    if (!sender || !(*sender)->begin(version_of(1), soon())) return 1;
    amid.give();
    ::raise(SIGSTOP);
    const Status sent = (*sender)->finish(soon());
    return sent.ok() ? 2 : 0;
  });
  const auto receiver = connect();
  const auto torn = (*receiver)->pull({.number = 1}, CallOptions::within(std::chrono::milliseconds(500)));
  ASSERT_FALSE(torn.ok());
  EXPECT_EQ(torn.error().code(), Errc::timed_out) << torn.error().message();
  EXPECT_EQ((*receiver)->current(), std::nullopt);
  amid.wait();
  trainer.signal(SIGCONT);
  EXPECT_EQ(trainer.wait(), 0) << "it was told, or its channel is closed";
  std::thread again([&] {
    auto sender = open();
    EXPECT_TRUE(sender.ok() && send(**sender, model_.half, 1).ok());
  });
  EXPECT_TRUE(take(**receiver, 1).ok());
  again.join();
  EXPECT_TRUE(has(**receiver, model_.half));
}

TEST_F(BucketChannel, AnEngineThatIsKilledAmidAVersionIsAnErrorAndTheNextOneIsFound) {
  const auto engine = [&] {
    const auto receiver = connect();
    if (!receiver) return 1;
    std::thread watch([&] {
      while ((*receiver)->progress().first == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
      ::raise(SIGKILL);
    });
    static_cast<void>((*receiver)->pull({.number = 1}, in_a_minute()));
    watch.join();
    return 2;
  };
  Child first(engine);
  const auto sender = open();
  ASSERT_TRUE(sender.ok()) << sender.error().message();
  const Status torn = send(**sender, model_.half, 1);
  EXPECT_EQ(first.wait(), -SIGKILL);
  ASSERT_FALSE(torn.ok());
  EXPECT_EQ(torn.error().code(), Errc::connection) << torn.error().message();
  Child second([&] {
    const auto receiver = connect();
    return receiver && take(**receiver, 2) && has(**receiver, model_.half) ? 0 : 1;
  });
  const Status sent = send(**sender, model_.half, 2);
  EXPECT_TRUE(sent.ok()) << sent.error().message();
  EXPECT_EQ(second.wait(), 0);
}

TEST_F(BucketChannel, AVersionThatIsNotWantedIsRefusedAndTheWantedOneTaken) {
  std::thread trainer([&] {
    auto sender = open();
    ASSERT_TRUE(sender.ok());
    const Status refused = send(**sender, model_.half, 4);
    ASSERT_FALSE(refused.ok());
    EXPECT_THAT(refused.error().message(), HasSubstr("number 5 is wanted"));
    EXPECT_TRUE(send(**sender, model_.half, 5).ok());
    EXPECT_TRUE(send(**sender, model_.half, 9).ok());
  });
  const auto receiver = connect();
  EXPECT_TRUE(take(**receiver, 5).ok());
  const Status past = take(**receiver, 8);
  ASSERT_FALSE(past.ok());
  EXPECT_EQ(past.error().code(), Errc::gone) << past.error().message();
  const auto newest = (*receiver)->pull({}, in_a_minute());
  ASSERT_TRUE(newest.ok()) << newest.error().message();
  EXPECT_EQ((*newest)->report().version, version_of(9)) << "it was offered still";
  EXPECT_TRUE((*newest)->commit(in_a_minute()).ok());
  trainer.join();
  const auto none = (*receiver)->pull({}, in_a_minute());
  ASSERT_TRUE(none.ok()) << none.error().message();
  EXPECT_EQ((*none)->report().mode, PullMode::up_to_date);
  EXPECT_EQ((*none)->report().version, version_of(9));
}

TEST_F(BucketChannel, WhatWasNotPutIsNamedOnBothSides) {
  const auto tensors = model_.layout->tensors();
  const std::string missing =
      "1 of " + std::to_string(tensors.size()) + " tensors have not come: " + tensors[2].spec.name;
  std::thread trainer([&] {
    auto sender = open();
    ASSERT_TRUE(sender.ok()) << sender.error().message();
    ASSERT_TRUE((*sender)->begin(version_of(1), soon()).ok());
    for (std::uint32_t t = 0; t < tensors.size(); ++t) {
      if (t == 2) continue;
      EXPECT_TRUE((*sender)->put(t, ByteSpan(model_.half).subspan(tensors[t].offset, tensors[t].bytes), soon()).ok());
    }
    EXPECT_EQ((*sender)->finish(soon()).error().to_string(), "coverage: " + missing) << "without asking the engine";
  });
  const auto receiver = connect();
  const Status taken = take(**receiver, 1);
  trainer.join();
  ASSERT_FALSE(taken.ok());
  EXPECT_EQ(taken.error().code(), Errc::aborted);
  EXPECT_THAT(taken.error().message(), HasSubstr("the trainer gave it up: " + missing));
  EXPECT_EQ((*receiver)->pull({.directory = dir_.path()}, in_a_minute()).error().code(), Errc::unsupported);
}

TEST_F(BucketChannel, WhyAnEngineGaveAVersionUpIsWhatItsTrainerHears) {
  RawEngine engine(path());
  std::thread gives_up([&] {
    engine.accept();
    engine.answer(engine.next());
    engine.answer(engine.next());
    EXPECT_EQ(engine.next().type(), wire::Type::bucket_chunk);
    EXPECT_TRUE(engine.socket.send(0, wire::ErrorMessage{Errc::corrupt, "a tile is wrong"}, soon().deadline()).ok());
    engine.socket.close();
  });
  auto sender = open();
  ASSERT_TRUE(sender.ok()) << sender.error().message();
  ASSERT_TRUE((*sender)->begin(version_of(1), soon()).ok());
  Status put;
  for (std::uint32_t t = 0; t < model_.layout->tensors().size() && put.ok(); ++t) {
    for (bool last = false; !last && put.ok();) {
      const bool issues = !(*sender)->fits(t);
      const auto room = (*sender)->room(t, soon());
      if (!room) put = room.error();
      if (issues && gives_up.joinable()) gives_up.join();
      last = room.ok() && room->last;
    }
  }
  ASSERT_FALSE(put.ok());
  EXPECT_EQ(put.error().to_string(), "corrupt: a tile is wrong") << "and not that it has closed";
}

TEST_F(BucketChannel, WithoutATrainerOrAnEngineCallsEndAtTheirDeadline) {
  const auto briefly = CallOptions::within(std::chrono::milliseconds(50));
  const auto receiver = Receiver::connect({.endpoint = "bucket:" + path()}, briefly);
  ASSERT_FALSE(receiver.ok());
  EXPECT_EQ(receiver.error().code(), Errc::timed_out);
  EXPECT_THAT(receiver.error().message(), HasSubstr("no trainer has connected"));
  const auto sender = bucket::Sender::open(model_.layout, {}, {.socket = path(), .half_bytes = kBucketBytes},
                                           CallOptions::within(std::chrono::milliseconds(50)));
  ASSERT_FALSE(sender.ok());
  EXPECT_EQ(sender.error().code(), Errc::timed_out);
  EXPECT_THAT(sender.error().message(), HasSubstr("no engine answered"));
  EXPECT_EQ(Receiver::connect({.endpoint = "bucket:" + path(), .token = "secret"}, briefly).error().code(),
            Errc::invalid_argument);
}

}  // namespace
}  // namespace deltasync::test
