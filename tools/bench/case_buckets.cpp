// bench colocated, its second half: a trainer's thread hands tensors to an engine's through a bucket channel. What each
// of 90,000 small tensors costs, and what is won by filling one bucket while the engine takes the other: against the
// same work with a wait for the engine after each bucket, when filling a bucket takes as much of a processor as taking
// it.
#include "bench/case_buckets.hpp"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <ctime>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bench/limits.hpp"
#include "bucket/sender.hpp"
#include "deltasync/receiver.hpp"
#include "deltasync/target.hpp"

namespace deltasync::bench {
namespace {

constexpr std::uint32_t kSmallTensors = 90'000;
constexpr std::uint64_t kSmallBucket = 4u << 20;
constexpr std::uint64_t kCols = 1024;
constexpr std::uint32_t kTensorsPerBucket = 2;
constexpr std::uint32_t kBuckets = 32;

double cpu_s(clockid_t clock) {
  timespec t{};
  ::clock_gettime(clock, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

/// Of a version, from its begin to its end as the trainer sees it.
struct Times {
  double wall_s = 0;
  double fill_s = 0;  ///< the trainer's thread was computing
  double take_s = 0;  ///< all others were
};

/// Both ends, in this process.
class Channel {
 public:
  static Result<Channel> open(const LayoutPtr& layout, std::uint64_t half_bytes, std::span<std::byte> memory) {
    const std::string path =
        (std::filesystem::temp_directory_path() / ("deltasync-bench-" + std::to_string(::getpid()) + ".sock")).string();
    Channel made;
    Result<std::unique_ptr<Receiver>> receiver = Error(Errc::internal, "not made");
    std::thread engine([&] {
      ReceiverOptions options;
      options.endpoint = "bucket:" + path;
      options.threads = 1;
      receiver = Receiver::connect(options, Deadline::after(kCaseLimit));
    });
    auto sender = bucket::Sender::open(layout, {}, {.socket = path, .half_bytes = half_bytes, .name = "bench"},
                                       Deadline::after(kCaseLimit));
    engine.join();
    DS_ASSIGN(made.sender, std::move(sender));
    DS_ASSIGN(made.receiver, std::move(receiver));
    DS_TRY(made.receiver->bind(make_host_target(layout, memory), Deadline::after(kCaseLimit)));
    return made;
  }

  /// `fill` puts all tensors, and returns what of its thread's time it has only waited.
  Result<Times> send(const std::function<Result<double>(bucket::Sender&)>& fill) {
    const Version version{{1, ++number_}, ""};
    Status taken = Error(Errc::internal, "not taken");
    std::thread engine([&] {
      const auto take = [&]() -> Status {
        DS_ASSIGN(const auto staged, receiver->pull({.number = version.id.number}, Deadline::after(kCaseLimit)));
        return staged->commit();
      };
      taken = take();
    });
    const auto play = [&]() -> Result<Times> {
      DS_TRY(sender->begin(version, Deadline::after(kCaseLimit)));
      const Stopwatch watch;
      const double thread = cpu_s(CLOCK_THREAD_CPUTIME_ID);
      const double process = cpu_s(CLOCK_PROCESS_CPUTIME_ID);
      DS_ASSIGN(const double waited, fill(*sender));
      DS_TRY(sender->finish(Deadline::after(kCaseLimit)));
      const double own = cpu_s(CLOCK_THREAD_CPUTIME_ID) - thread;
      return Times{watch.seconds(), own - waited, cpu_s(CLOCK_PROCESS_CPUTIME_ID) - process - own};
    };
    auto times = play();
    if (!times) sender->abort(times.error());
    engine.join();
    DS_TRY(std::move(taken));
    return times;
  }

  std::unique_ptr<bucket::Sender> sender;
  std::unique_ptr<Receiver> receiver;

 private:
  std::uint64_t number_ = 0;
};

/// The shortest round.
Times best(const std::vector<Times>& rounds) {
  return *std::min_element(rounds.begin(), rounds.end(), [](auto& a, auto& b) { return a.wall_s < b.wall_s; });
}

// ---- many tensors --------------------------------------------------------------------------------------------------

Result<LayoutPtr> small_tensors() {
  std::vector<TensorSpec> specs;
  specs.reserve(kSmallTensors);
  for (std::uint32_t i = 0; i < kSmallTensors; ++i) {
    specs.push_back({.name = "model.layers." + std::to_string(i / 1500) + ".mlp.experts." + std::to_string(i % 1500) +
                             ".gate_proj.weight_scale_inv",
                     .dtype = Dtype::f32,
                     .shape = {4, 8}});
  }
  return Layout::build(std::move(specs));
}

/// Tensors of 128 bytes.
Result<Times> send_small(const Options& options, ThreadPool& pool) {
  DS_ASSIGN(const LayoutPtr layout, small_tensors());
  DS_ASSIGN(const Buffer memory, Buffer::allocate(layout->half_bytes(), pool));
  DS_ASSIGN(const Buffer source, Buffer::allocate(layout->half_bytes(), pool));
  std::fill(source.span().begin(), source.span().end(), std::byte{0x3c});
  DS_ASSIGN(Channel channel, Channel::open(layout, kSmallBucket, memory.span()));
  const CallContext until = Deadline::after(kCaseLimit);
  std::vector<Times> rounds;
  for (unsigned round = 0; round < rounds_of(options); ++round) {
    source.span()[layout->tensors()[round].offset] ^= std::byte{1};
    DS_ASSIGN(const Times one, channel.send([&](bucket::Sender& sender) -> Result<double> {
      const auto tensors = layout->tensors();
      for (std::uint32_t t = 0; t < tensors.size(); ++t) {
        DS_TRY(sender.put(t, ByteSpan(source.span()).subspan(tensors[t].offset, tensors[t].bytes), until));
      }
      return 0.0;
    }));
    rounds.push_back(one);
  }
  for (const Tensor& tensor : layout->tensors()) {
    if (std::memcmp(memory.span().data() + tensor.offset, source.span().data() + tensor.offset, tensor.bytes) != 0) {
      return Error(Errc::corrupt, "buckets: " + tensor.spec.name + " differs from what was sent");
    }
  }
  return best(rounds);
}

// ---- one bucket while the other ------------------------------------------------------------------------------------

/// f32 to bf16, rounding to nearest even.
void convert(const float* from, std::uint16_t* to, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(from[i]);
    to[i] = static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}

class Pipeline {
 public:
  static Result<Pipeline> make(const Options& options, ThreadPool& pool) {
    const double tensor_bytes = options.model_gib * 0x1p30 / (2 * kBuckets * kTensorsPerBucket);
    const auto rows = std::max<std::uint64_t>(64, static_cast<std::uint64_t>(tensor_bytes) / (2 * kCols) / 64 * 64);
    std::vector<TensorSpec> specs;
    for (std::uint32_t t = 0; t < kBuckets * kTensorsPerBucket; ++t) {
      specs.push_back({.name = "w" + std::to_string(t), .dtype = Dtype::bf16, .shape = {rows, kCols}});
    }
    DS_ASSIGN(LayoutPtr layout, Layout::build(std::move(specs)));
    DS_ASSIGN(Buffer memory, Buffer::allocate(layout->half_bytes(), pool));
    DS_ASSIGN(Channel channel, Channel::open(layout, kTensorsPerBucket * layout->tensors()[0].bytes, memory.span()));
    return Pipeline(std::move(layout), std::move(memory), std::move(channel));
  }

  /// As a trainer would: `passes` of converting.
  Result<Times> pipelined(double passes) {
    return channel_.send([&](bucket::Sender& sender) { return fill(sender, passes, false); });
  }
  /// Nothing is filled before the engine has taken what there is.
  Result<Times> serial(double passes) {
    return channel_.send([&](bucket::Sender& sender) { return fill(sender, passes, true); });
  }
  Status check() const {
    std::vector<std::uint16_t> wanted(source_.size());
    convert(source_.data(), wanted.data(), wanted.size());
    for (const Tensor& tensor : layout_->tensors()) {
      for (std::uint64_t row = 0; row < tensor.rows; ++row) {
        const std::byte* const got = memory_.span().data() + tensor.offset + row * tensor.row_bytes();
        if (std::memcmp(got, wanted.data() + row % kSourceRows * kCols, kCols * 2) == 0) continue;
        return Error(Errc::corrupt, "buckets: " + tensor.spec.name + " differs from what was sent");
      }
    }
    return {};
  }

 private:
  static constexpr std::uint64_t kSourceRows = 64;  // in a cache: what takes time is what is written

  Pipeline(LayoutPtr layout, Buffer memory, Channel channel)
      : layout_(std::move(layout)),
        memory_(std::move(memory)),
        channel_(std::move(channel)),
        source_(kSourceRows * kCols) {
    for (std::size_t i = 0; i < source_.size(); ++i) source_[i] = std::sin(static_cast<float>(i));
  }

  /// The rows at `to`, as often as is said, the last time in part.
  void convert_rows(MutByteSpan to, double passes) const {
    auto* const out = reinterpret_cast<std::uint16_t*>(to.data());
    const std::uint64_t rows = to.size() / (2 * kCols);
    const auto all = static_cast<std::uint64_t>(std::llround(passes * static_cast<double>(rows)));
    for (std::uint64_t i = 0; i < std::max(all, rows); ++i) {
      const std::uint64_t row = i % rows;
      convert(source_.data() + row % kSourceRows * kCols, out + row * kCols, kCols);
    }
  }

  Result<double> fill(bucket::Sender& sender, double passes, bool serial) {
    source_[0] += 1.0F;
    const CallContext until = Deadline::after(kCaseLimit);
    std::uint64_t filled = 0;
    double waited = 0;
    for (std::uint32_t t = 0; t < layout_->tensors().size(); ++t) {
      const bool issues = !sender.fits(t);
      DS_ASSIGN(const bucket::Sender::Room room, sender.room(t, until));
      if (serial && issues) {
        const double since = cpu_s(CLOCK_THREAD_CPUTIME_ID);
        while (channel_.receiver->progress().first < filled) std::this_thread::yield();
        waited += cpu_s(CLOCK_THREAD_CPUTIME_ID) - since;
      }
      convert_rows(room.to, passes);
      filled += room.to.size();
    }
    return waited;
  }

  LayoutPtr layout_;
  Buffer memory_;
  Channel channel_;
  std::vector<float> source_;
};

}  // namespace

Result<Json> run_buckets(const Options& options) {
  ThreadPool pool(options.threads, "bench");
  DS_ASSIGN(const Times small, send_small(options, pool));
  DS_ASSIGN(Pipeline pipeline, Pipeline::make(options, pool));
  // As many passes as make filling a bucket cost as much as taking it.
  Times one;
  Times two;
  for (int i = 0; i < 2; ++i) {  // the first touches the memory
    DS_ASSIGN(one, pipeline.serial(1));
    DS_ASSIGN(two, pipeline.serial(2));
  }
  const double passes = 1 + std::max(0.0, (one.take_s - one.fill_s) / std::max(1e-9, two.fill_s - one.fill_s));
  std::vector<Times> serial;
  std::vector<Times> pipelined;
  for (unsigned round = 0; round < rounds_of(options); ++round) {
    DS_ASSIGN(const Times apart, pipeline.serial(passes));
    DS_ASSIGN(const Times together, pipeline.pipelined(passes));
    serial.push_back(apart);
    pipelined.push_back(together);
  }
  DS_TRY(pipeline.check());
  const Times apart = best(serial);
  const Times together = best(pipelined);
  constexpr double kMicroEach = 1e6 / kSmallTensors;
  return Json{{"metadata_us_per_tensor", small.wall_s * kMicroEach},
              {"metadata_fill_us", small.fill_s * kMicroEach},
              {"metadata_take_us", small.take_s * kMicroEach},
              {"serial_s", apart.wall_s},
              {"pipelined_s", together.wall_s},
              {"pipelined_to_serial", together.wall_s / apart.wall_s},
              {"fill_to_take", apart.fill_s / apart.take_s}};
}

}  // namespace deltasync::bench
