// Trainers that are broken, or lie: each gets an error that says so, the engine keeps its version, and the next one
// works.
#include <fcntl.h>
#include <gmock/gmock-matchers.h>
#include <sys/mman.h>

#include "tests/bucket/raw_peers.hpp"

namespace deltasync::test {
namespace {

using testing::HasSubstr;

class BadTrainers : public BucketChannel {
 protected:
  void SetUp() override {
    std::thread trainer([&] {
      auto sender = open();
      ASSERT_TRUE(sender.ok()) << sender.error().message();
      EXPECT_TRUE(send(**sender, model_.half, 1).ok());
    });
    auto receiver = connect();
    ASSERT_TRUE(receiver.ok()) << receiver.error().message();
    receiver_ = *std::move(receiver);
    EXPECT_TRUE(take(*receiver_, 1).ok());
    trainer.join();
  }
  /// What the engine says of version 2, while this trainer is there; after it all is as it was, and a good one works.
  std::string pull_beside(const std::function<void(RawTrainer&)>& play) {
    RawTrainer raw(model_.layout);
    std::thread trainer([&] { play(raw); });
    const auto pulled = receiver_->pull({.number = 2}, in_a_minute());
    trainer.join();
    EXPECT_EQ(receiver_->current(), version_of(1));
    EXPECT_TRUE(has(*receiver_, model_.half));
    const std::string said = pulled.ok() ? "pulled" : pulled.error().to_string();
    std::thread good([&] {
      auto sender = open();
      ASSERT_TRUE(sender.ok()) << sender.error().message();
      EXPECT_TRUE(send(**sender, model_.half, 3).ok());
    });
    EXPECT_TRUE(take(*receiver_, 3).ok());
    good.join();
    return said;
  }
  /// The engine's refusal of a hello.
  std::string refused_hello(const std::function<void(RawTrainer&)>& change, int descriptor = -2) {
    RawTrainer raw(model_.layout);
    change(raw);
    std::string said;
    std::thread trainer([&] {
      const Status heard = raw.connect(path(), descriptor == -2 ? raw.memory->descriptor() : descriptor);
      said = heard.ok() ? "welcome" : heard.error().to_string();
      raw.socket.close();
      auto sender = open();
      ASSERT_TRUE(sender.ok()) << sender.error().message();
      EXPECT_TRUE(send(**sender, model_.half, 2).ok());
    });
    EXPECT_TRUE(take(*receiver_, 2).ok()) << "who is refused is in nobody's way";
    trainer.join();
    return said;
  }

  std::unique_ptr<Receiver> receiver_;
};

TEST_F(BadTrainers, HellosThatCannotBe) {
  EXPECT_THAT(refused_hello([](RawTrainer& raw) { raw.hello.ranks = 0; }), HasSubstr("rank 0 of 0 ranks"));
}
TEST_F(BadTrainers, TensorsOutOfRangeInAHello) {
  EXPECT_THAT(refused_hello([](RawTrainer& raw) { ++raw.hello.tensors[0].end; }), HasSubstr("out_of_range: tensor "));
}
TEST_F(BadTrainers, AnotherLayout) {
  const LayoutPtr other = Layout::build({{.name = "w", .dtype = Dtype::f32, .shape = {4}}}).value();
  EXPECT_THAT(refused_hello([&](RawTrainer& raw) {
                raw.hello.tensors = {};
                raw.hello.layout = wire::pack_layout(other->encode(), {}).value();
              }),
              HasSubstr("layout_mismatch: rank 0 (raw) has another layout"));
}
TEST_F(BadTrainers, AHelloWithoutADescriptor) {
  EXPECT_THAT(refused_hello([](RawTrainer&) {}, -1), HasSubstr("corrupt: buckets: no descriptor came"));
}
TEST_F(BadTrainers, AShortDescriptorIsAnErrorAndNoSigbus) {
  UniqueFd file(::memfd_create("short", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(file.get(), 4096), 0);
  EXPECT_THAT(refused_hello([](RawTrainer&) {}, file.get()), HasSubstr("whose size is sealed"));
}
TEST_F(BadTrainers, AnotherSizeThanTheDescriptors) {
  EXPECT_THAT(refused_hello([](RawTrainer& raw) { raw.hello.half_bytes *= 2; }), HasSubstr("corrupt: buckets: "));
}

/// Nobody has to wait for who offers what cannot be.
TEST_F(BadTrainers, OffersThatCannotBe) {
  std::vector<Status> said;
  std::thread trainer([&] {
    const auto once = [&](const auto& message) {
      RawTrainer raw(model_.layout);
      EXPECT_TRUE(raw.connect(path()).ok());
      said.push_back(raw.say(message));
    };
    once(wire::BucketBegin{{{0, 2}, ""}});
    once(wire::BucketFinish{});
    once(wire::ErrorMessage{Errc::no_space, "no room"});
    auto sender = open();
    ASSERT_TRUE(sender.ok()) << sender.error().message();
    EXPECT_TRUE(send(**sender, model_.half, 2).ok());
  });
  EXPECT_TRUE(take(*receiver_, 2).ok());
  trainer.join();
  ASSERT_EQ(said.size(), 3u);
  EXPECT_THAT(said[0].error().to_string(), HasSubstr("invalid_argument: a version with epoch 0"));
  EXPECT_THAT(said[1].error().to_string(), HasSubstr("came where a bucket_begin was due"));
  EXPECT_THAT(said[2].error().to_string(), HasSubstr("aborted: it has given up"));
}

TEST_F(BadTrainers, BytesThatAreNotThoseOfTheDigestNameTheTile) {
  EXPECT_THAT(pull_beside([&](RawTrainer& raw) {
                EXPECT_TRUE(raw.connect(path()).ok());
                EXPECT_TRUE(raw.say(wire::BucketBegin{version_of(2)}).ok());
                wire::BucketChunk chunk = raw.first_chunk(model_.half);
                chunk.digests[0] ^= 1;
                const Status said = raw.say(chunk);
                ASSERT_FALSE(said.ok());
                EXPECT_EQ(said.error().code(), Errc::corrupt);
                EXPECT_THAT(said.error().message(), HasSubstr("the engine: "));
              }),
              HasSubstr("rank 0 (raw): tile 0 (" + model_.layout->tensors()[0].spec.name + ") has not the bytes"));
}
TEST_F(BadTrainers, AManifestThatComesEarlyNamesTheRest) {
  EXPECT_THAT(pull_beside([&](RawTrainer& raw) {
                EXPECT_TRUE(raw.connect(path()).ok());
                EXPECT_TRUE(raw.say(wire::BucketBegin{version_of(2)}).ok());
                EXPECT_TRUE(raw.say(raw.first_chunk(model_.half)).ok());
                EXPECT_EQ(raw.say(wire::BucketFinish{}).error().code(), Errc::coverage);
              }),
              HasSubstr("tensors have not come: " + model_.layout->tensors()[1].spec.name));
}
TEST_F(BadTrainers, AChunkThatIsRefusedEndsTheVersion) {
  EXPECT_THAT(pull_beside([&](RawTrainer& raw) {
                EXPECT_TRUE(raw.connect(path()).ok());
                EXPECT_TRUE(raw.say(wire::BucketBegin{version_of(2)}).ok());
                EXPECT_EQ(raw.say(wire::BucketChunk{0, {{999'999, 0, 0}}, {}}).error().code(), Errc::out_of_range);
              }),
              HasSubstr("out_of_range: version step_2"));
}
TEST_F(BadTrainers, AMessageOutOfPlaceEndsTheVersion) {
  EXPECT_THAT(pull_beside([&](RawTrainer& raw) {
                EXPECT_TRUE(raw.connect(path()).ok());
                EXPECT_TRUE(raw.say(wire::BucketBegin{version_of(2)}).ok());
                EXPECT_EQ(raw.say(wire::BucketBegin{version_of(3)}).error().code(), Errc::protocol);
              }),
              HasSubstr("protocol: "));
}
TEST_F(BadTrainers, ATrainerThatGivesUpSaysWhy) {
  EXPECT_THAT(pull_beside([&](RawTrainer& raw) {
                EXPECT_TRUE(raw.connect(path()).ok());
                EXPECT_TRUE(raw.say(wire::BucketBegin{version_of(2)}).ok());
                EXPECT_TRUE(raw.socket.send(9, wire::ErrorMessage{Errc::no_space, "no room"}, soon().deadline()).ok());
              }),
              HasSubstr("the trainer gave it up: no room"));
}

}  // namespace
}  // namespace deltasync::test
