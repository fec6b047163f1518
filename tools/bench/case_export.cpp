// bench export: what a trainer waits for whose eight ranks hold a model in another form: each writes its own
// rectangles, by an export plan, into the half of the node's agent. Beside it one copy of the model by as many threads.
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <thread>

#include "base/deadline.hpp"
#include "bench/limits.hpp"
#include "bench/moe_shards.hpp"
#include "bench/processes.hpp"
#include "deltasync/writer.hpp"

namespace deltasync::bench {
namespace {

/// A rank: its writer, and what that copies.
struct ExportRank {
  std::unique_ptr<Writer> writer;
  std::vector<SliceSource> slices;
};

/// Calls `work` for all ranks at once, as they wait for each other.
Status on_each(const std::function<Status(std::uint32_t rank)>& work) {
  std::vector<Status> done(kExportRanks);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < kExportRanks; ++rank) {
    threads.emplace_back([&, rank] {
      set_thread_name("rank-" + std::to_string(rank));
      done[rank] = work(rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::uint32_t rank = 0; rank < kExportRanks; ++rank) {
    if (!done[rank]) return std::move(done[rank]).with_context("rank " + std::to_string(rank));
  }
  return {};
}

class Exporter {
 public:
  static Result<Exporter> start(const Options& options, const MoeShards& shards, const LayoutPtr& layout,
                                const ExportPlan& plan, std::span<const std::byte> memory) {
    Options alone = options;  // as bench offload has it: the agent diffs when all is there
    alone.overlap_threads = 0;
    DS_ASSIGN(BenchAgent agent, BenchAgent::start(alone));
    Exporter exporter(std::move(agent));
    for (const ExportCopy& copy : plan.copies) {
      DS_ASSIGN(const auto slices, export_slices(plan, copy, Dtype::bf16));
      const std::byte* piece = memory.data() + shards.at[copy.rank][copy.piece];
      for (const PlacedSlice& slice : slices) {
        exporter.ranks_[copy.rank].slices.push_back({{copy.tensor, slice.rect},
                                                     {.data = piece + slice.offset,
                                                      .row_stride_bytes = static_cast<std::size_t>(slice.row_stride),
                                                      .col_stride_bytes = static_cast<std::size_t>(slice.col_stride)}});
        exporter.read_bytes_ += slice.rect.elements() * 2;
      }
    }
    DS_TRY(on_each([&](std::uint32_t rank) { return exporter.attach(rank, layout); }));
    return exporter;
  }

  /// Seconds until all ranks have committed. `filled`: looks at the half before.
  Result<double> version(const std::function<Status(std::span<const std::byte> half)>& filled = {}) {
    const Version version{{epoch_, ++number_}, "step_" + std::to_string(number_)};
    const Stopwatch watch;
    const auto write = [&](std::uint32_t rank) -> Status {
      DS_TRY(ranks_[rank].writer->begin(version, Deadline::after(kCaseLimit)));
      DS_TRY(ranks_[rank].writer->write(ranks_[rank].slices));
      return filled ? Status() : commit(rank);
    };
    DS_TRY(on_each(write));
    if (filled) {
      DS_TRY(filled(ranks_[0].writer->filling()));
      DS_TRY(on_each([&](std::uint32_t rank) { return commit(rank); }));
    }
    const double took = watch.seconds();
    DS_TRY(ranks_[0].writer->wait_ready(version.id, Deadline::after(kCaseLimit)));
    return took;
  }

  std::uint64_t rectangles() const {
    std::uint64_t count = 0;
    for (const ExportRank& rank : ranks_) count += rank.slices.size();
    return count;
  }
  std::uint64_t read_bytes() const noexcept { return read_bytes_; }
  /// Of the newest version.
  std::uint64_t written_bytes() const {
    std::uint64_t bytes = 0;
    for (const OffloadReport& report : reports_) bytes += report.bytes;
    return bytes;
  }

 private:
  explicit Exporter(BenchAgent agent) : agent_(std::move(agent)), ranks_(kExportRanks), reports_(kExportRanks) {}

  Status attach(std::uint32_t rank, const LayoutPtr& layout) {
    WriterOptions options;
    options.agent_socket = agent_.socket();
    options.writer_index = rank;
    options.writers = kExportRanks;
    options.threads = 1;
    DS_ASSIGN(ranks_[rank].writer, Writer::attach(layout, make_sidecar(*layout), options, Deadline::after(kCaseLimit)));
    std::vector<TensorSlice> plan;
    for (const SliceSource& slice : ranks_[rank].slices) plan.push_back(slice.slice);
    return ranks_[rank].writer->register_plan(plan, Deadline::after(kCaseLimit));
  }
  Status commit(std::uint32_t rank) {
    DS_ASSIGN(reports_[rank], ranks_[rank].writer->commit(Deadline::after(kCaseLimit)));
    return {};
  }

  BenchAgent agent_;
  std::vector<ExportRank> ranks_;  // their writers close before the agent ends
  std::vector<OffloadReport> reports_;
  std::uint64_t read_bytes_ = 0;
  std::uint64_t epoch_ = make_epoch();
  std::uint64_t number_ = 0;
};

/// The model as the plan says, made another way.
Status apply_all(const MoeShards& shards, const ExportPlan& plan, std::span<const std::byte> memory,
                 std::span<std::byte> half) {
  for (const ExportCopy& copy : plan.copies) {
    const Tensor& tensor = plan.layout->tensors()[copy.tensor];
    const auto piece = memory.subspan(static_cast<std::size_t>(shards.at[copy.rank][copy.piece]));
    DS_TRY(apply_on_host(plan, copy, Dtype::bf16, piece, half.subspan(tensor.offset, tensor.bytes)));
  }
  return {};
}

/// Bits that differ from place to place.
void fill(std::span<std::byte> memory, std::uint64_t seed, ThreadPool& pool) {
  constexpr std::uint64_t kChunk = 1 << 20;
  pool.run((memory.size() + kChunk - 1) / kChunk, [&](std::uint64_t index, unsigned) {
    std::uint64_t state = seed + index * 0x9E3779B97F4A7C15U + 1;
    const std::uint64_t end = std::min<std::uint64_t>((index + 1) * kChunk, memory.size());
    for (std::uint64_t at = index * kChunk; at < end; ++at) {
      if (at % 8 == 0) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
      }
      memory[at] = static_cast<std::byte>(state >> (at % 8 * 8));
    }
  });
}

double share(std::uint64_t part, std::uint64_t whole) {
  return static_cast<double>(part) / static_cast<double>(whole);
}

}  // namespace

Result<Json> run_export(const Options& options) {
  ThreadPool pool(kExportRanks, "bench");
  const MoeShards shards = moe_shards(static_cast<std::uint64_t>(options.model_gib * 0x1p30));
  DS_ASSIGN(const LayoutPtr layout, Layout::build(shards.specs));
  const Stopwatch planning;
  DS_ASSIGN(const ExportPlan plan, plan_export({}, shards.config, layout, shards.pieces));
  const double plan_s = planning.seconds();
  DS_ASSIGN(const Buffer memory, Buffer::allocate(shards.bytes, pool));
  DS_ASSIGN(const Buffer copy, Buffer::allocate(std::max(layout->half_bytes(), shards.bytes), pool));
  fill(memory.span(), options.seed, pool);
  DS_ASSIGN(Exporter exporter, Exporter::start(options, shards, layout, plan, memory.span()));

  const std::span<std::byte> expected = copy.span().first(layout->half_bytes());
  DS_TRY(apply_all(shards, plan, memory.span(), expected));
  const auto compare = [&](std::span<const std::byte> half) -> Status {
    for (const Tensor& tensor : layout->tensors()) {
      const auto is = half.subspan(tensor.offset, tensor.bytes);
      if (!std::equal(is.begin(), is.end(), expected.begin() + static_cast<std::ptrdiff_t>(tensor.offset))) {
        return Error(Errc::corrupt, tensor.spec.name + " was not written as apply_on_host() makes it");
      }
    }
    return {};
  };
  // The first two versions write into pages that are new to the ranks.
  for (unsigned warm_up = 0; warm_up < 2; ++warm_up) DS_TRY(exporter.version(compare));
  double copy_s = 1e300;
  std::vector<double> direct;
  std::uint64_t temporary = 0;
  const std::uint64_t model = layout->model_bytes();
  for (unsigned round = 0; round < rounds_of(options); ++round) {
    copy_s = std::min(copy_s, copy_once(copy.span().first(model), memory.span().first(model), pool));
    const std::uint64_t before = rss_anon_bytes(::getpid());
    const RssSampler sampler(::getpid());
    DS_ASSIGN(direct.emplace_back(), exporter.version());
    temporary = std::max(temporary, sampler.peak_bytes() - std::min(before, sampler.peak_bytes()));
  }
  const double direct_s = median(direct);
  return Json{{"ranks", kExportRanks},
              {"model_bytes", model},
              {"tensors", layout->tensors().size()},
              {"copies", plan.copies.size()},
              {"rectangles", exporter.rectangles()},
              {"plan_s", plan_s},
              {"memcpy_s", copy_s},
              {"direct_s", direct_s},
              {"ratio_to_memcpy", direct_s / copy_s},
              {"read_bytes", exporter.read_bytes()},
              {"written_bytes", exporter.written_bytes()},
              {"read_to_model", share(exporter.read_bytes(), model)},
              {"written_to_model", share(exporter.written_bytes(), model)},
              {"temporary_bytes_max", temporary},
              {"verified", true}};
}

}  // namespace deltasync::bench
