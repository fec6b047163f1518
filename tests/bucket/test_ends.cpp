// Waits of either end that a stop ends, and what a forked child must leave alone.
#include <gmock/gmock-matchers.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "tests/bucket/raw_peers.hpp"

namespace deltasync::test {
namespace {

using testing::HasSubstr;

/// What a call says that is stopped while it waits, long before its deadline; `until` returns when it is about to.
template <class F>
std::string stopped(const F& call, const std::function<void()>& until = {}) {
  std::stop_source stop;
  std::thread later([&] {
    if (until) until();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // it waits by now
    stop.request_stop();
  });
  CallOptions options = in_a_minute();
  options.stop = stop.get_token();
  const auto done = call(options);
  later.join();
  return done.ok() ? std::string("done") : done.error().to_string();
}

class BucketStops : public BucketChannel {
 protected:
  /// An engine's wait, beside a trainer that has said something and stays.
  std::string pull_stopped(
      const std::function<void(RawTrainer&)>& play, const std::function<void(RawTrainer&)>& then = [](RawTrainer&) {}) {
    RawTrainer raw(model_.layout);
    std::thread meets([&] { EXPECT_TRUE(raw.connect(path()).ok()); });
    const auto receiver = connect();
    meets.join();
    if (!receiver) return receiver.error().to_string();
    const std::string said =
        stopped([&](const CallOptions& call) { return (*receiver)->pull({.number = 1}, call); }, [&] { play(raw); });
    EXPECT_EQ((*receiver)->current(), std::nullopt);
    then(raw);
    raw.socket.close();
    std::thread good([&] {
      auto sender = open();
      EXPECT_TRUE(sender.ok() && send(**sender, model_.half, 2).ok());
    });
    EXPECT_TRUE(take(**receiver, 2).ok());
    good.join();
    return said;
  }
};

TEST_F(BucketStops, AnEngineThatWaitsForATrainer) {
  EXPECT_THAT(
      stopped([&](const CallOptions& call) { return Receiver::connect({.endpoint = "bucket:" + path()}, call); }),
      HasSubstr("cancelled: "));
}
TEST_F(BucketStops, AnEngineThatWaitsForAnOffer) {
  EXPECT_THAT(pull_stopped([](RawTrainer&) {}), HasSubstr("cancelled: "));
}
TEST_F(BucketStops, AnEngineThatWaitsForTheRestOfAHello) {
  RawTrainer other(model_.layout);
  EXPECT_THAT(pull_stopped([&](RawTrainer&) {
                ASSERT_TRUE(other.reach(path()).ok());
                other.say_a_part(wire::Type::bucket_hello);
              }),
              HasSubstr("cancelled: "));
  EXPECT_EQ(other.heard(1).error().code(), Errc::connection) << "not later";
}
TEST_F(BucketStops, AnEngineThatWaitsForTheRestOfAnOffer) {
  const auto closed = [](RawTrainer& raw) { EXPECT_EQ(raw.heard(9).error().code(), Errc::connection) << "not later"; };
  EXPECT_THAT(pull_stopped([](RawTrainer& raw) { raw.say_a_part(wire::Type::bucket_begin); }, closed),
              HasSubstr("cancelled: "));
}
TEST_F(BucketStops, AnEngineThatWaitsForAChunk) {
  EXPECT_THAT(pull_stopped([](RawTrainer& raw) { EXPECT_TRUE(raw.say(wire::BucketBegin{version_of(1)}).ok()); }),
              HasSubstr("cancelled: "));
}
TEST_F(BucketStops, AnEngineThatWaitsForTheRestOfAChunk) {
  EXPECT_THAT(pull_stopped([](RawTrainer& raw) {
                EXPECT_TRUE(raw.say(wire::BucketBegin{version_of(1)}).ok());
                raw.say_a_part(wire::Type::bucket_chunk);
              }),
              HasSubstr("cancelled: "));
}

TEST_F(BucketStops, AStopIsOfItsOwnVersionOnly) {
  std::thread trainer([&] {
    auto sender = open();
    ASSERT_TRUE(sender.ok()) << sender.error().message();
    for (std::uint64_t v = 1; v < 3; ++v) {
      const Status sent = send(**sender, model_.half, v);
      EXPECT_TRUE(sent.ok()) << sent.error().message();
    }
  });
  std::stop_source stops[2];
  const auto stoppable = [&](int i) {
    CallOptions call = in_a_minute();
    call.stop = stops[i].get_token();
    return call;
  };
  const auto stop = [&](int i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // the next version is offered by now
    stops[i].request_stop();
  };
  const auto receiver = Receiver::connect({.endpoint = "bucket:" + path()}, stoppable(0));
  ASSERT_TRUE(receiver.ok()) << receiver.error().message();
  ASSERT_TRUE((*receiver)->bind(make_host_target((*receiver)->layout()), in_a_minute()).ok());
  stop(0);
  {
    const auto staged = (*receiver)->pull({.number = 1}, stoppable(1));
    EXPECT_TRUE(staged.ok() && (*staged)->commit(in_a_minute()).ok());
  }
  stop(1);
  EXPECT_TRUE(take(**receiver, 2).ok());
  trainer.join();
}

TEST_F(BucketStops, ATrainerThatWaitsForAnEngine) {
  EXPECT_THAT(stopped([&](const CallOptions& call) {
                return bucket::Sender::open(model_.layout, {}, {.socket = path(), .half_bytes = kBucketBytes}, call);
              }),
              HasSubstr("cancelled: "));
}
/// An engine answers all until a message of this type; of chunks, the first or the last one.
struct Silence {
  const char* name;
  wire::Type at;
  bool last = false;
};
class BucketSilence : public BucketChannel, public ::testing::WithParamInterface<Silence> {
 protected:
  void answer_until_then(RawEngine& engine) const {
    engine.accept();
    std::uint64_t tiles = 0;
    for (;;) {
      const net::Message message = engine.next();
      if (message.type() == wire::Type::bucket_chunk) {
        tiles += wire::BucketChunk::decode(message.payload).value().digests.size();
      }
      const bool last = tiles == model_.layout->tile_count();
      if (message.type() == GetParam().at && last == GetParam().last) return;
      engine.answer(message);
    }
  }
};

TEST_P(BucketSilence, ATrainerThatWaitsForItsAnswer) {
  RawEngine engine(path());
  const auto tensors = model_.layout->tensors();
  // Only the call that waits for the silence is stopped.
  const auto send = [&](const CallOptions& stops) -> Status {
    const auto call = [&](bool waits) { return waits ? stops : in_a_minute(); };
    const wire::Type at = GetParam().at;
    DS_ASSIGN(const auto sender, bucket::Sender::open(model_.layout, {}, {.socket = path(), .half_bytes = kBucketBytes},
                                                      call(at == wire::Type::bucket_hello)));
    DS_TRY(sender->begin(version_of(1), call(at == wire::Type::bucket_begin)));
    const CallOptions put = call(at == wire::Type::bucket_chunk && !GetParam().last);
    for (std::uint32_t t = 0; t < tensors.size(); ++t) {
      DS_TRY(sender->put(t, ByteSpan(model_.half).subspan(tensors[t].offset, tensors[t].bytes), put));
    }
    return sender->finish(call(GetParam().last));
  };
  EXPECT_THAT(stopped(send, [&] { answer_until_then(engine); }), HasSubstr("cancelled: "));
}
INSTANTIATE_TEST_SUITE_P(Messages, BucketSilence,
                         ::testing::Values(Silence{"hello", wire::Type::bucket_hello},
                                           Silence{"begin", wire::Type::bucket_begin},
                                           Silence{"chunk", wire::Type::bucket_chunk},
                                           Silence{"last_chunk", wire::Type::bucket_chunk, true},
                                           Silence{"finish", wire::Type::bucket_finish, true}),
                         [](const auto& silence) { return std::string(silence.param.name); });

/// While it lives this process opens no more.
class NoMoreDescriptors {
 public:
  NoMoreDescriptors() {
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    rlimit none = before_;
    none.rlim_cur = 3;
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  }
  ~NoMoreDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  NoMoreDescriptors(const NoMoreDescriptors&) = delete;
  NoMoreDescriptors& operator=(const NoMoreDescriptors&) = delete;

 private:
  rlimit before_{};
};

TEST_F(BucketChannel, AnEngineWithoutADescriptorForATrainerSaysSo) {
  Signal go;
  Signal there;
  const Child late([&] {
    go.wait();
    RawTrainer raw(model_.layout);
    if (!raw.reach(path())) return 1;
    there.give();
    return ::pause();
  });
  std::unique_ptr<bucket::Sender> sender;
  std::thread meets([&] { sender = open().value(); });
  const auto receiver = connect();
  meets.join();
  ASSERT_TRUE(receiver.ok()) << receiver.error().message();
  {
    const NoMoreDescriptors none;
    go.give();
    there.wait();
    const auto pulled = (*receiver)->pull({.number = 1}, CallOptions::within(std::chrono::seconds(5)));
    ASSERT_FALSE(pulled.ok());
    EXPECT_THAT(pulled.error().to_string(), HasSubstr("accepting a trainer: Too many open files"));
  }
  std::thread trainer([&] { EXPECT_TRUE(send(*sender, model_.half, 1).ok()); });
  EXPECT_TRUE(take(**receiver, 1).ok());
  trainer.join();
}

TEST_F(BucketChannel, AForkedChildTakesNothingAway) {
  std::unique_ptr<bucket::Sender> sender;
  std::thread trainer([&] {
    sender = open().value();
    EXPECT_TRUE(send(*sender, model_.half, 1).ok());
  });
  auto receiver = connect();
  ASSERT_TRUE(take(**receiver, 1).ok());
  trainer.join();
  Child child([&] {
    sender.reset();
    receiver->reset();
    return 0;
  });
  EXPECT_EQ(child.wait(), 0);
  EXPECT_TRUE(std::filesystem::exists(path()));
  std::thread again([&] { EXPECT_TRUE(send(*sender, model_.half, 2).ok()); });
  EXPECT_TRUE(take(**receiver, 2).ok());
  again.join();
  receiver->reset();
  EXPECT_FALSE(std::filesystem::exists(path()));
}

TEST_F(BucketChannel, AForkedChildDoesNotGiveTheVersionUp) {
  std::thread trainer([&] {
    auto sender = open();
    ASSERT_TRUE(sender.ok()) << sender.error().message();
    ASSERT_TRUE((*sender)->begin(version_of(1), soon()).ok());
    Child child([&] {
      sender->reset();
      return 0;
    });
    EXPECT_EQ(child.wait(), 0);
    const auto tensors = model_.layout->tensors();
    for (std::uint32_t t = 0; t < tensors.size(); ++t) {
      EXPECT_TRUE((*sender)->put(t, ByteSpan(model_.half).subspan(tensors[t].offset, tensors[t].bytes), soon()).ok());
    }
    EXPECT_TRUE((*sender)->finish(soon()).ok());
  });
  const auto receiver = connect();
  EXPECT_TRUE(take(**receiver, 1).ok());
  trainer.join();
  EXPECT_TRUE(has(**receiver, model_.half));
}

/// The buckets are not mapped there, and something else may be by then.
TEST_F(BucketChannel, AForkedChildDoesNotUnmapWhatItMappedWhereTheBucketsWere) {
  auto memory = bucket::make_host_buckets(kBucketBytes).value();
  Child child([&] {
    void* const there = memory->room(0).data();
    void* const own = ::mmap(there, 2 * kBucketBytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (own != there) return 1;
    memory.reset();
    static_cast<volatile char*>(own)[0] = 5;  // else SIGSEGV
    return 0;
  });
  EXPECT_EQ(child.wait(), 0);
}

}  // namespace
}  // namespace deltasync::test
