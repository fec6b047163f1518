// Who may be a rank of a channel, which version all ranks mean, and who comes again after having gone.
#include <gmock/gmock-matchers.h>

#include "tests/bucket/raw_peers.hpp"
#include "tests/support/log_lines.hpp"

namespace deltasync::test {
namespace {

using testing::HasSubstr;

class BucketOffers : public BucketChannel {
 protected:
  std::uint64_t count() const { return model_.layout->tensors().size(); }
  /// One of two ranks: the first three tensors, or the others.
  bucket::SenderOptions one_of_two(std::uint32_t rank) const {
    std::vector<wire::TileRange> tensors{{0, 3}};
    if (rank == 1) tensors = {{3, count()}};
    return {.rank = rank, .ranks = 2, .tensors = std::move(tensors)};
  }
};

TEST_F(BucketOffers, RanksThatMeanDifferentVersionsAreAllToldAndTheNextOneWorks) {
  std::vector<std::thread> ranks;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      auto sender = open(one_of_two(rank));
      ASSERT_TRUE(sender.ok()) << sender.error().message();
      const Status apart = (*sender)->begin(version_of(1 + rank), soon());
      ASSERT_FALSE(apart.ok());
      EXPECT_EQ(apart.error().code(), Errc::version_conflict) << apart.error().message();
      EXPECT_TRUE(send(**sender, model_.half, 3).ok());
    });
  }
  const auto receiver = connect();
  const Status apart = take(**receiver, 1);
  ASSERT_FALSE(apart.ok());
  EXPECT_EQ(apart.error().code(), Errc::version_conflict);
  EXPECT_THAT(apart.error().message(), HasSubstr(") offers "));
  EXPECT_TRUE(take(**receiver, 3).ok());
  for (std::thread& rank : ranks) rank.join();
  EXPECT_TRUE(has(**receiver, model_.half));
}

TEST_F(BucketOffers, ARankIsConnectedOnce) {
  std::thread trainer([&] {
    auto first = open();
    ASSERT_TRUE(first.ok()) << first.error().message();
    const auto second = open();
    ASSERT_FALSE(second.ok());
    EXPECT_EQ(second.error().code(), Errc::already_exists);
    EXPECT_THAT(second.error().message(), HasSubstr("rank 0 (trainer) is connected already"));
    EXPECT_TRUE(send(**first, model_.half, 1).ok());
  });
  const auto receiver = connect();
  EXPECT_TRUE(take(**receiver, 1).ok());
  trainer.join();
}

TEST_F(BucketOffers, RanksOfAnotherNumberAreAnotherTrainersOnceTheseAreGone) {
  std::thread trainer([&] {
    auto first = open(one_of_two(0));
    ASSERT_TRUE(first.ok()) << first.error().message();
    const auto other = open({.rank = 1, .ranks = 3});
    ASSERT_FALSE(other.ok());
    EXPECT_EQ(other.error().code(), Errc::invalid_argument);
    EXPECT_THAT(other.error().message(), HasSubstr("rank 1 (trainer) is of 3 ranks, rank 0 (trainer) of 2"));
    first->reset();
    auto alone = open();
    ASSERT_TRUE(alone.ok()) << alone.error().message();
    EXPECT_TRUE(send(**alone, model_.half, 1).ok());
  });
  const auto receiver = connect();
  EXPECT_TRUE(take(**receiver, 1).ok());
  trainer.join();
}

TEST_F(BucketOffers, AnOfferIsGoneWithItsRank) {
  std::thread trainers([&] {
    RawTrainer gone(model_.layout);
    gone.hello.ranks = 2;
    gone.hello.tensors = {{0, 3}};
    ASSERT_TRUE(gone.connect(path()).ok());
    auto second = open(one_of_two(1));
    ASSERT_TRUE(second.ok()) << second.error().message();
    EXPECT_TRUE(gone.socket.send(2, wire::BucketBegin{version_of(1)}, soon().deadline()).ok());
    gone.socket.close();
    std::thread waits([&] { EXPECT_TRUE(send(**second, model_.half, 1).ok()); });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // its offer is heard by now
    auto first = open(one_of_two(0));
    EXPECT_TRUE(first.ok() && send(**first, model_.half, 1).ok());
    waits.join();
  });
  const auto receiver = connect();
  const Status taken = take(**receiver, 1);
  EXPECT_TRUE(taken.ok()) << taken.error().message();
  trainers.join();
  EXPECT_TRUE(has(**receiver, model_.half));
}

TEST_F(BucketOffers, AnOfferThatIsHeardTogetherWithTheEndOfItsRankIsNone) {
  RawTrainer ranks[] = {RawTrainer(model_.layout), RawTrainer(model_.layout)};
  std::atomic<bool> there{false};
  std::thread meet([&] {
    for (std::uint32_t r = 0; r < 2; ++r) {
      const bucket::SenderOptions one = one_of_two(r);
      ranks[r].hello.rank = r;
      ranks[r].hello.ranks = 2;
      ranks[r].hello.tensors = one.tensors;
      EXPECT_TRUE(ranks[r].connect(path()).ok());
    }
    there = true;
  });
  const auto receiver = connect();
  ASSERT_TRUE(receiver.ok()) << receiver.error().message();
  const auto look = [&] {
    const auto pulled = (*receiver)->pull({.number = 1, .wait_max = std::chrono::milliseconds(20)}, in_a_minute());
    return pulled.ok() ? std::string("a version") : pulled.error().to_string();
  };
  while (!there) EXPECT_THAT(look(), HasSubstr("timed_out: "));
  meet.join();
  for (RawTrainer& rank : ranks) {
    EXPECT_TRUE(rank.socket.send(2, wire::BucketBegin{version_of(1)}, soon().deadline()).ok());
  }
  ranks[0].socket.close();
  EXPECT_THAT(look(), HasSubstr("1 of 2 ranks offer one"));
}

TEST_F(BucketOffers, ARankThatComesAgainWhileTheOneBeforeGoesIsNotInItsOwnWay) {
  std::thread trainer([&] {
    RawTrainer before(model_.layout);
    ASSERT_TRUE(before.connect(path()).ok());
    RawTrainer again(model_.layout);
    ASSERT_TRUE(again.reach(path()).ok());
    const Status welcome = again.greet_around([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));  // the engine hears the hello by now
      before.socket.close();
    });
    EXPECT_TRUE(welcome.ok()) << welcome.error().message();
    again.socket.close();
    auto sender = open();
    EXPECT_TRUE(sender.ok() && send(**sender, model_.half, 1).ok());
  });
  const auto receiver = connect();
  EXPECT_TRUE(take(**receiver, 1).ok());
  trainer.join();
}

TEST_F(BucketOffers, WhatIsNotWantedIsRefusedAndWhatIsWantedTaken) {
  const auto of_epoch = [](std::uint64_t epoch, std::uint64_t number) { return Version{{epoch, number}, ""}; };
  std::unique_ptr<Receiver> receiver;
  // What the first offer is told, and the second one is taken.
  const auto told = [&](const Version& first, const Want& want, const Version& second) {
    std::string said;
    std::thread trainer([&] {
      auto sender = open();
      ASSERT_TRUE(sender.ok()) << sender.error().message();
      const Status begun = (*sender)->begin(first, soon());
      said = begun.ok() ? "begun" : begun.error().to_string();
      (*sender)->abort(Error(Errc::aborted, "it was a question"));
      EXPECT_TRUE(send(**sender, model_.half, second).ok());
    });
    if (receiver == nullptr) receiver = connect().value();
    const auto staged = receiver->pull(want, in_a_minute());
    trainer.join();
    EXPECT_TRUE(staged.ok() && (*staged)->commit(in_a_minute()).ok());
    EXPECT_EQ(receiver->current(), second);
    return said;
  };
  EXPECT_THAT(told(version_of(2), {.number = 3}, version_of(3)), HasSubstr("is offered, number 3 is wanted"));
  EXPECT_THAT(told(version_of(3), {.newer = true}, version_of(4)), HasSubstr("version_conflict: "));
  EXPECT_THAT(told(version_of(2), {.newer = true}, version_of(5)), HasSubstr("is offered, the engine has "));
  EXPECT_THAT(told(version_of(7), {.label = "step_6"}, version_of(6)), HasSubstr("is offered, 'step_6' is wanted"));
  EXPECT_THAT(told(version_of(9), {.number = 9, .epoch = 80}, of_epoch(80, 9)), HasSubstr("number 9 is wanted"));
  EXPECT_THAT(told(version_of(10), {.number = 2, .epoch = 81}, of_epoch(81, 2)), HasSubstr("number 2 is wanted"));
}

TEST_F(BucketOffers, ATrainerAsksForTheEpochOfWhatTheEngineHas) {
  std::thread trainer([&] {
    auto sender = open();
    ASSERT_TRUE(sender.ok()) << sender.error().message();
    for (const std::uint64_t held : {std::uint64_t{0}, kEpoch}) {
      const auto said = (*sender)->epoch_held(soon());
      ASSERT_TRUE(said.ok()) << said.error().message();
      EXPECT_EQ(*said, held);
      ASSERT_TRUE((*sender)->begin(version_of(held + 1), soon()).ok());
      EXPECT_EQ((*sender)->epoch_held(soon()).error().code(), Errc::invalid_argument);
      (*sender)->abort(Error(Errc::aborted, "it was a question"));
      EXPECT_TRUE(send(**sender, model_.half, held + 2).ok());
    }
  });
  const auto receiver = connect();
  for (const std::uint64_t held : {std::uint64_t{0}, kEpoch}) {
    EXPECT_EQ(take(**receiver, held + 1).error().code(), Errc::aborted);
    EXPECT_TRUE(take(**receiver, held + 2).ok());
  }
  trainer.join();
}

TEST_F(BucketOffers, TheNewestIsWaitedForOnceOneRankOffersIt) {
  Signal go;
  std::vector<std::thread> ranks;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      auto sender = open(one_of_two(rank));
      ASSERT_TRUE(sender.ok()) << sender.error().message();
      EXPECT_TRUE(send(**sender, model_.half, 1).ok());
      if (rank == 1) {
        go.wait();
        std::this_thread::sleep_for(std::chrono::milliseconds(50));  // the engine waits by now
      }
      EXPECT_TRUE(send(**sender, model_.half, 2).ok());
    });
  }
  const auto receiver = connect();
  EXPECT_TRUE(take(**receiver, 1).ok());
  while ((*receiver)->lag().newest->id.number != 2) {
    const auto early = (*receiver)->pull({.newer = true, .wait_max = std::chrono::milliseconds(20)}, in_a_minute());
    ASSERT_FALSE(early.ok());
    EXPECT_EQ(early.error().code(), Errc::timed_out);
  }
  go.give();
  const auto newest = (*receiver)->pull({}, in_a_minute());
  ASSERT_TRUE(newest.ok()) << newest.error().message();
  EXPECT_EQ((*newest)->report().version, version_of(2));
  EXPECT_TRUE((*newest)->commit(in_a_minute()).ok());
  for (std::thread& rank : ranks) rank.join();
}

TEST_F(BucketOffers, AnotherEpochsVersionIsNewerWhateverItsNumber) {
  std::thread trainer([&] {
    auto sender = open();
    ASSERT_TRUE(sender.ok()) << sender.error().message();
    EXPECT_TRUE(send(**sender, model_.half, 5).ok());
    EXPECT_TRUE(send(**sender, model_.half, Version{{kEpoch + 1, 1}, ""}).ok());
  });
  const auto receiver = connect();
  for (int i = 0; i < 2; ++i) {
    const auto staged = (*receiver)->pull({.newer = true}, in_a_minute());
    EXPECT_TRUE(staged.ok() && (*staged)->commit(in_a_minute()).ok());
  }
  trainer.join();
  EXPECT_EQ((*receiver)->current()->id.number, 1u);
}

/// What an engine that has version 5 makes of one of an older epoch.
class BucketOlderEpoch : public BucketOffers {
 protected:
  static Version older() { return {{kEpoch - 1, 1}, ""}; }
  /// Offers `older()`, and then, unless it is taken, `next`.
  void start(OlderEpoch policy, const Version& next) {
    trainer_ = std::thread([this, next] {
      auto sender = open();
      ASSERT_TRUE(sender.ok()) << sender.error().message();
      EXPECT_TRUE(send(**sender, model_.half, 5).ok());
      const Status sent = send(**sender, model_.half, older());
      if (sent.ok()) return;
      told_ = sent.error().to_string();
      EXPECT_TRUE(send(**sender, model_.half, next).ok());
    });
    receiver_ = connect({.on_older_epoch = policy}).value();
    EXPECT_TRUE(take(*receiver_, 5).ok());
  }
  Status take_newer() {
    DS_ASSIGN(const auto staged, receiver_->pull({.newer = true}, in_a_minute()));
    return staged->commit(in_a_minute());
  }
  void TearDown() override { trainer_.join(); }

  const LogLines lines_;
  std::unique_ptr<Receiver> receiver_;
  std::string told_;
  std::thread trainer_;
};

TEST_F(BucketOlderEpoch, IsFollowedAndTheLogSaysSo) {
  start(OlderEpoch::follow, {});
  EXPECT_TRUE(take_newer().ok());
  EXPECT_EQ(receiver_->current(), older());
  EXPECT_TRUE(lines_.has("older_epoch ")) << lines_.text();
}

TEST_F(BucketOlderEpoch, IsRefusedWhileALaterOneIsWaitedFor) {
  start(OlderEpoch::wait, version_of(6));
  EXPECT_TRUE(take_newer().ok());
  EXPECT_EQ(receiver_->current(), version_of(6));
  EXPECT_THAT(told_, HasSubstr("version_conflict: "));
  EXPECT_THAT(told_, HasSubstr("of an older epoch than "));
  EXPECT_TRUE(lines_.has("older_epoch ")) << lines_.text();
}

TEST_F(BucketOlderEpoch, FailsThePullUnlessItIsNamed) {
  start(OlderEpoch::fail, older());
  const Status failed = take_newer();
  ASSERT_FALSE(failed.ok());
  EXPECT_EQ(failed.error().code(), Errc::version_conflict);
  EXPECT_THAT(failed.error().message(), HasSubstr("of an older epoch than "));
  EXPECT_TRUE(take(*receiver_, 1).ok());
  EXPECT_EQ(receiver_->current(), older());
  EXPECT_THAT(told_, HasSubstr("version_conflict: "));
}

/// A directory would have the new tensors beside the old files.
TEST_F(BucketOffers, ATrainerWithOtherSideFilesIsRefusedByADirectory) {
  const auto with = [&](const std::string& text) {
    Sidecar sidecar = make_sidecar(*model_.layout);
    const auto* const bytes = reinterpret_cast<const std::byte*>(text.data());
    sidecar.others.push_back({"generation_config.json", {bytes, bytes + text.size()}});
    return sidecar;
  };
  std::thread trainer([&] {
    std::uint64_t version = 0;
    for (const char* text : {"{}", "{\"top_k\": 5}", "{}"}) {
      auto sender = open({}, with(text));
      ASSERT_TRUE(sender.ok()) << sender.error().message();
      const Status sent = send(**sender, model_.half, ++version);
      EXPECT_EQ(sent.ok(), version != 2);
      EXPECT_THAT(sent.ok() ? "" : sent.error().to_string(), HasSubstr(version == 2 ? "layout_mismatch: " : ""));
    }
  });
  const auto receiver = Receiver::connect({.endpoint = "bucket:" + path(), .threads = 2}, in_a_minute());
  ASSERT_TRUE(receiver.ok()) << receiver.error().message();
  auto target = make_hf_target((*receiver)->layout(), (*receiver)->sidecar(), dir_.path() / "hf");
  ASSERT_TRUE(target.ok()) << target.error().message();
  ASSERT_TRUE((*receiver)->bind(*std::move(target), in_a_minute()).ok());
  EXPECT_TRUE(take(**receiver, 1).ok());
  const Status other = take(**receiver, 2);
  ASSERT_FALSE(other.ok());
  EXPECT_EQ(other.error().code(), Errc::layout_mismatch);
  EXPECT_THAT(other.error().message(), HasSubstr("side files changed (generation_config.json)"));
  EXPECT_EQ((*receiver)->current(), version_of(1));
  EXPECT_TRUE(take(**receiver, 3).ok());
  trainer.join();
}

TEST_F(BucketOffers, AnEngineThatWritesNoSideFilesTakesATrainerWithOthers) {
  std::thread trainer([&] {
    Sidecar sidecar = make_sidecar(*model_.layout);
    for (std::uint64_t version = 1; version < 3; ++version) {
      auto sender = open({}, sidecar);
      EXPECT_TRUE(sender.ok() && send(**sender, model_.half, version).ok());
      sidecar.others.push_back({"generation_config.json", {}});
    }
  });
  const auto receiver = connect();
  for (std::uint64_t version = 1; version < 3; ++version) EXPECT_TRUE(take(**receiver, version).ok());
  trainer.join();
}

/// Else its trainer would say that a step had failed whose weights the engine has.
TEST_F(BucketOffers, ARankThatGivesUpWhileItWaitsForTheOthersGivesTheVersionUp) {
  Signal given_up;
  std::thread first([&] {
    auto sender = open(one_of_two(0));
    ASSERT_TRUE(sender.ok()) << sender.error().message();
    ASSERT_TRUE((*sender)->begin(version_of(1), soon()).ok());
    const auto tensors = model_.layout->tensors();
    for (std::uint32_t t = 0; t < 3; ++t) {
      EXPECT_TRUE((*sender)->put(t, ByteSpan(model_.half).subspan(tensors[t].offset, tensors[t].bytes), soon()).ok());
    }
    const Status late = (*sender)->finish(Deadline::after(std::chrono::milliseconds(50)));
    ASSERT_FALSE(late.ok());
    EXPECT_EQ(late.error().code(), Errc::timed_out);
    given_up.give();
    EXPECT_TRUE(send(**sender, model_.half, 2).ok());
  });
  std::thread second([&] {
    auto sender = open(one_of_two(1));
    ASSERT_TRUE(sender.ok()) << sender.error().message();
    ASSERT_TRUE((*sender)->begin(version_of(1), soon()).ok());
    given_up.wait();
    const auto tensors = model_.layout->tensors();
    Status sent;
    for (std::uint32_t t = 3; sent.ok() && t < tensors.size(); ++t) {
      sent = (*sender)->put(t, ByteSpan(model_.half).subspan(tensors[t].offset, tensors[t].bytes), soon());
    }
    if (sent.ok()) sent = (*sender)->finish(soon());
    EXPECT_FALSE(sent.ok());
    EXPECT_TRUE(send(**sender, model_.half, 2).ok());
  });
  const auto receiver = connect();
  const Status torn = take(**receiver, 1);
  EXPECT_EQ((*receiver)->current(), std::nullopt);
  EXPECT_THAT(torn.ok() ? "taken" : torn.error().message(), HasSubstr("rank 0 (trainer)"));
  EXPECT_TRUE(take(**receiver, 2).ok());
  first.join();
  second.join();
}

TEST_F(BucketOffers, AnEngineThatEndedInPeaceIsFoundAgainByTheSameSender) {
  std::unique_ptr<bucket::Sender> sender;
  for (std::uint64_t v = 1; v < 4; ++v) {
    std::thread engine([&] {
      const auto receiver = connect();
      ASSERT_TRUE(receiver.ok()) << receiver.error().message();
      EXPECT_TRUE(take(**receiver, v).ok());
      EXPECT_TRUE(has(**receiver, model_.half));
    });
    if (sender == nullptr) sender = open().value();
    const Status sent = send(*sender, model_.half, v);
    EXPECT_TRUE(sent.ok()) << sent.error().message();
    engine.join();
  }
}

/// What the engine knows of the version that failed is no beginning for the next.
TEST_F(BucketOffers, AVersionThatFailedIsFollowedByAnotherConnection) {
  RawEngine engine(path());
  std::thread trainer([&] {
    auto sender = open();
    ASSERT_TRUE(sender.ok()) << sender.error().message();
    const Status late = (*sender)->begin(version_of(1), Deadline::after(std::chrono::milliseconds(50)));
    ASSERT_FALSE(late.ok());
    EXPECT_EQ(late.error().code(), Errc::timed_out);
    EXPECT_TRUE((*sender)->begin(version_of(1), soon()).ok());
  });
  engine.accept();
  engine.answer(engine.next());
  EXPECT_EQ(engine.next().type(), wire::Type::bucket_begin);
  const auto more = engine.socket.recv(wire::kLayoutBytesMax, soon().deadline());
  EXPECT_FALSE(more.ok()) << wire::to_string(more->type());
  engine.accept();
  engine.answer(engine.next());
  const net::Message begin = engine.next();
  EXPECT_EQ(begin.type(), wire::Type::bucket_begin);
  engine.answer(begin);
  trainer.join();
}

/// Who removed the first one's socket has given the path to the second one.
TEST_F(BucketOffers, AnEngineThatEndsLeavesAnothersSocket) {
  const auto listens = [&] {
    std::thread meets([&] { EXPECT_TRUE(open().ok()); });
    auto receiver = connect();
    meets.join();
    return receiver;
  };
  auto first = listens();
  ASSERT_TRUE(first.ok()) << first.error().message();
  std::filesystem::remove(path());
  const auto second = listens();
  ASSERT_TRUE(second.ok()) << second.error().message();
  first->reset();
  EXPECT_TRUE(std::filesystem::exists(path()));
}

}  // namespace
}  // namespace deltasync::test
