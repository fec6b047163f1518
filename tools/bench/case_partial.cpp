// bench partial: what tensor-parallel ranks get from a real agent, each only its slices: a full transfer and the delta
// of one step, for 1, 2, 4 and 8 ranks. Sizes are Qwen2.5-7B's where they do not divide into tiles (vocabulary 151,936,
// ffn 18,944); the hidden dimension follows from the size asked for.
#include <algorithm>
#include <memory>

#include "base/bytes.hpp"
#include "base/deadline.hpp"
#include "bench/bench.hpp"
#include "bench/processes.hpp"
#include "bench/synth.hpp"
#include "deltasync/receiver.hpp"
#include "deltasync/writer.hpp"

namespace deltasync::bench {
namespace {

constexpr std::uint64_t kWays = 8;  ///< the layout's cuts
constexpr std::uint64_t kVocabulary = 151'936;
constexpr std::uint64_t kFfnWidth = 18'944;

enum class Parallel : std::uint8_t { rows, columns, none };
struct TpTensor {
  TensorSpec spec;
  Parallel parallel = Parallel::none;
};

/// Two embeddings and two layers, each tensor cut for kWays ranks in its own direction.
std::vector<TpTensor> tensors_of(std::uint64_t model_bytes) {
  const std::uint64_t per_hidden =
      2 * kVocabulary + 2 * 3 * kFfnWidth;  // elements for each unit of the hidden dimension
  const std::uint64_t hidden = std::max<std::uint64_t>(model_bytes / 2 / per_hidden / 64, 1) * 64;
  std::vector<TpTensor> tensors;
  const auto add = [&](std::string name, std::vector<std::uint64_t> shape, Parallel parallel) {
    TpTensor t{{std::move(name), Dtype::bf16, std::move(shape), {}, {}}, parallel};
    const std::uint64_t length = parallel == Parallel::rows ? t.spec.shape.front() : t.spec.shape.back();
    auto& cuts = parallel == Parallel::rows ? t.spec.row_cuts : t.spec.col_cuts;
    for (std::uint64_t i = 1; i < kWays && parallel != Parallel::none; ++i) cuts.push_back(i * (length / kWays));
    tensors.push_back(std::move(t));
  };
  add("model.embed_tokens.weight", {kVocabulary, hidden}, Parallel::rows);
  for (const char* const layer : {"model.layers.0.", "model.layers.1."}) {
    const std::string p = layer;
    add(p + "input_layernorm.weight", {hidden}, Parallel::none);
    add(p + "self_attn.q_proj.weight", {hidden, hidden}, Parallel::rows);
    add(p + "self_attn.o_proj.weight", {hidden, hidden}, Parallel::columns);
    add(p + "mlp.gate_proj.weight", {kFfnWidth, hidden}, Parallel::rows);
    add(p + "mlp.up_proj.weight", {kFfnWidth, hidden}, Parallel::rows);
    add(p + "mlp.down_proj.weight", {hidden, kFfnWidth}, Parallel::columns);
  }
  add("lm_head.weight", {kVocabulary, hidden}, Parallel::rows);
  return tensors;
}

Result<std::vector<Slice>> slices_of(const Layout& layout, const std::vector<TpTensor>& tensors, std::uint64_t rank,
                                     std::uint64_t ranks) {
  std::vector<Slice> subscription;
  for (const TpTensor& t : tensors) {
    Slice slice{t.spec.name, std::nullopt};
    if (t.parallel == Parallel::rows) {
      DS_ASSIGN(slice, row_slice(layout, t.spec.name, rank, ranks));
    } else if (t.parallel == Parallel::columns) {
      DS_ASSIGN(slice, col_slice(layout, t.spec.name, rank, ranks));
    }
    subscription.push_back(std::move(slice));
  }
  return subscription;
}

Status publish(Writer& writer, ByteSpan half, const Version& version) {
  DS_TRY(writer.begin(version, Deadline::after(kCaseLimit)));
  const auto tensors = writer.layout()->tensors();
  for (std::uint32_t t = 0; t < tensors.size(); ++t) {
    DS_TRY(writer.write(t, Source{half.data() + tensors[t].offset}));
  }
  DS_ASSIGN([[maybe_unused]] const auto report, writer.commit(Deadline::after(kCaseLimit)));
  return writer.wait_ready(version.id, Deadline::after(kCaseLimit));
}

bool same_rect(const Tensor& tensor, const Rect& rect, ByteSpan a, ByteSpan b) {
  for (std::uint64_t r = rect.row; r < rect.row + rect.rows; ++r) {
    const std::uint64_t at = tensor.offset + r * tensor.row_bytes() + rect.col * tensor.element_bytes;
    const std::uint64_t bytes = rect.cols * tensor.element_bytes;
    if (!std::equal(a.begin() + static_cast<std::ptrdiff_t>(at), a.begin() + static_cast<std::ptrdiff_t>(at + bytes),
                    b.begin() + static_cast<std::ptrdiff_t>(at))) {
      return false;
    }
  }
  return true;
}

/// One rank: its receiver, and what its pulls did.
struct Rank {
  std::uint64_t ranks = 1;
  std::vector<Slice> slices;
  std::unique_ptr<Receiver> receiver;
  PullReport full;
  PullReport delta;
  double delta_s = 0;
};

Result<PullReport> pull(Rank& rank, const Layout& layout, ByteSpan source) {
  DS_ASSIGN(const auto staged, rank.receiver->pull({}, Deadline::after(kCaseLimit)));
  DS_TRY(staged->commit());
  const ByteSpan held = host_target_memory(*rank.receiver->target());
  for (const Slice& slice : rank.slices) {
    const Tensor& tensor = layout.tensors()[*layout.find(slice.tensor)];
    if (!same_rect(tensor, slice.rect.value_or(Rect{0, 0, tensor.rows, tensor.cols}), held, source)) {
      return Error(Errc::corrupt, "a rank's slice of " + slice.tensor + " differs from the published one");
    }
  }
  return staged->report();
}

/// Bytes of tiles: extents and frames.
std::uint64_t payload(const PullReport& report) {
  return report.wire_bytes - report.metadata_bytes;
}

/// Over the ranks of one number of ranks.
Json row_of(const std::vector<Rank>& all, std::uint64_t ranks, std::uint64_t whole_delta) {
  std::uint64_t full = 0;
  std::uint64_t delta = 0;
  std::uint64_t deltas = 0;
  std::uint64_t metadata = 0;
  double pull_s = 0;
  for (const Rank& rank : all) {
    if (rank.ranks != ranks) continue;
    full = std::max(full, payload(rank.full));
    delta = std::max(delta, payload(rank.delta));
    deltas += payload(rank.delta);
    metadata = std::max(metadata, rank.delta.metadata_bytes);
    pull_s = std::max(pull_s, rank.delta_s);
  }
  return Json{{"ranks", ranks},
              {"full_bytes", full},
              {"delta_bytes", delta},
              {"metadata_bytes", metadata},
              {"delta_share", static_cast<double>(delta) / static_cast<double>(whole_delta)},
              {"deltas_to_whole", static_cast<double>(deltas) / static_cast<double>(whole_delta)},
              {"pull_ms", pull_s * 1e3}};
}

}  // namespace

Result<Json> run_partial(const Options& options) {
  ThreadPool pool(options.threads, "bench");
  const std::vector<TpTensor> tensors = tensors_of(static_cast<std::uint64_t>(options.model_gib * 0x1p30));
  std::vector<TensorSpec> specs;
  specs.reserve(tensors.size());
  for (const TpTensor& t : tensors) specs.push_back(t.spec);
  DS_ASSIGN(const LayoutPtr layout, Layout::build(std::move(specs)));
  std::vector<std::byte> source(static_cast<std::size_t>(layout->half_bytes()));
  SyntheticModel model(layout, options.density, options.seed, pool);
  model.write_half(source);
  DS_ASSIGN(const BenchAgent agent, BenchAgent::start(options));
  WriterOptions writer_options;
  writer_options.agent_socket = agent.socket();
  writer_options.threads = options.threads;
  DS_ASSIGN(const auto writer,
            Writer::attach(layout, make_sidecar(*layout), writer_options, Deadline::after(kCaseLimit)));
  const std::uint64_t epoch = make_epoch();
  DS_TRY(publish(*writer, source, {{epoch, 1}, "1"}));

  std::vector<Rank> ranks;
  for (std::uint64_t n = 1; n <= kWays; n *= 2) {
    for (std::uint64_t i = 0; i < n; ++i) {
      Rank& rank = ranks.emplace_back();
      rank.ranks = n;
      DS_ASSIGN(rank.slices, slices_of(*layout, tensors, i, n));
      ReceiverOptions receiver_options;
      receiver_options.endpoint = agent.endpoint();
      receiver_options.streams = options.streams;
      receiver_options.threads = options.threads;
      receiver_options.local = false;  // what is sent is counted
      DS_ASSIGN(rank.receiver, Receiver::connect(receiver_options, Deadline::after(kCaseLimit)));
      DS_TRY(rank.receiver->bind(make_host_target(layout), rank.slices, Deadline::after(kCaseLimit)));
      DS_ASSIGN(rank.full, pull(rank, *layout, source));
    }
  }
  model.step();
  model.write_half(source);
  DS_TRY(publish(*writer, source, {{epoch, 2}, "2"}));
  for (Rank& rank : ranks) {
    DS_ASSIGN(rank.delta, pull(rank, *layout, source));
    rank.delta_s = rank.delta.wait_s + rank.delta.transfer_s + rank.delta.commit_s;
  }
  const std::uint64_t whole = payload(ranks.front().delta);
  Json rows = Json::array();
  for (std::uint64_t n = 1; n <= kWays; n *= 2) rows.push_back(row_of(ranks, n, whole));
  return Json{{"density", static_cast<double>(ranks.front().delta.changed) / static_cast<double>(layout->elements())},
              {"model_bytes", layout->model_bytes()},
              {"verified", true},
              {"rows", std::move(rows)}};
}

}  // namespace deltasync::bench
