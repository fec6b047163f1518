// Trainers that are broken, or lie: each gets an error that says so, the engine keeps its version, and the next one
// works.
#include <fcntl.h>
#include <gmock/gmock-matchers.h>
#include <sys/mman.h>

#include "delta/delta.hpp"
#include "format/packed_layout.hpp"
#include "format/wire_bucket.hpp"
#include "tests/bucket/channel_fixture.hpp"

namespace deltasync::test {
namespace {

using testing::HasSubstr;

/// Says what the test has it say.
class RawTrainer {
 public:
  explicit RawTrainer(const LayoutPtr& layout) : layout_(layout) {
    hello.half_bytes = kBucketBytes;
    hello.name = "raw";
    hello.tensors = {{0, layout->tensors().size()}};
    hello.layout = wire::pack_layout(layout->encode(), {}).value();
    memory = bucket::make_host_buckets(kBucketBytes).value();
  }
  /// What the engine answers to the hello with this descriptor.
  Status connect(const std::string& path, int descriptor) {
    const Deadline end = soon().deadline();
    for (;;) {
      auto fd = net::connect_unix(path, end);
      if (!fd && fd.error().code() == Errc::connection) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        continue;
      }
      if (!fd) return std::move(fd).error();
      socket = net::MessageSocket(std::move(*fd));
      break;
    }
    if (descriptor < 0) {
      DS_TRY(socket.send(1, hello, end));
    } else {
      DS_TRY(socket.send_with_file(wire::Type::bucket_hello, 1, hello.encode(), descriptor, end));
    }
    return heard(1);
  }
  Status connect(const std::string& path) { return connect(path, memory->descriptor()); }
  Status heard(std::uint64_t of) {
    auto answer = socket.recv_answer(of, wire::Type::end, soon().deadline());
    return answer ? Status() : Status(std::move(answer).error());
  }
  template <class M>
  Status say(const M& message) {
    DS_TRY(socket.send(++request, message, soon().deadline()));
    return heard(request);
  }
  /// Tensor 0 with its bytes, in half 0.
  wire::BucketChunk first_chunk(const std::vector<std::byte>& half) const {
    const Tensor& tensor = layout_->tensors()[0];
    std::copy_n(half.data() + tensor.offset, tensor.bytes, memory->room(0).data());
    wire::BucketChunk chunk{0, {{0, 0, 0}}, {}};
    for (std::uint64_t t = 0; t < tensor.tile_count; ++t) {
      chunk.digests.push_back(delta::tile_digest(*layout_, half, tensor.first_tile + t));
    }
    return chunk;
  }

  wire::BucketHello hello;
  std::unique_ptr<bucket::BucketMemory> memory;
  net::MessageSocket socket;
  std::uint64_t request = 1;

 private:
  const LayoutPtr layout_;
};

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
