// bench copy: all forms of the copy into a half, in turn, and which of them a writer chose by itself.
#include "bench/halves.hpp"
#include "bench/limits.hpp"
#include "writer/copy.hpp"

namespace deltasync::bench {
namespace {

constexpr std::uint64_t kPiece = 1u << 20;

double seconds_in(const CopyForm& form, MutByteSpan to, ByteSpan from, ThreadPool& pool) {
  const Stopwatch watch;
  pool.run((to.size() + kPiece - 1) / kPiece, [&](std::uint64_t i, unsigned) {
    const std::uint64_t at = i * kPiece;
    copy_in_form(form, to.data() + at, from.data() + at, std::min<std::uint64_t>(kPiece, to.size() - at));
  });
  return watch.seconds();
}

double seconds_of(Copier& copier, const Layout& layout, MutByteSpan to, ByteSpan from) {
  std::vector<CopyJob> jobs;
  for (const Tensor& tensor : layout.tensors()) {
    const auto row = static_cast<std::size_t>(tensor.row_bytes());
    jobs.push_back({to.data() + tensor.offset, row, from.data() + tensor.offset, row, tensor.rows, row});
  }
  const Stopwatch watch;
  copier.copy(jobs);
  return watch.seconds();
}

}  // namespace

Result<Json> run_copy(const Options& options) {
  ThreadPool pool(options.threads, "bench");
  DS_ASSIGN(Halves halves, Halves::make(options, pool));
  DS_ASSIGN(const Buffer source, Buffer::allocate(halves.layout().half_bytes(), pool));
  const MutByteSpan to = halves.writable();
  const ByteSpan from = source.span();
  const std::span<const CopyForm> forms = copy_forms();
  Copier copier(options.threads, "writer");
  copier.set_steady(true);
  std::vector<std::vector<double>> times(forms.size());
  std::vector<double> chosen;
  for (unsigned round = 0; round < rounds_of(options); ++round) {
    for (std::size_t f = 0; f < forms.size(); ++f) times[f].push_back(seconds_in(forms[f], to, from, pool));
    const bool known = copier.form().chosen;
    const double seconds = seconds_of(copier, halves.layout(), to, from);
    if (known) chosen.push_back(seconds);
  }
  const double gb = static_cast<double>(to.size()) / 1e9;
  Json table = Json::array();
  double best_s = 1e300;
  for (std::size_t f = 0; f < forms.size(); ++f) {
    const double seconds = median(times[f]);
    best_s = std::min(best_s, seconds);
    table.push_back({{"form", forms[f].name}, {"gbps", gb / seconds}});
  }
  const Copier::InUse in_use = copier.form();
  Json json{{"forms", table}, {"form", in_use.name}, {"chosen", in_use.chosen}};
  if (!chosen.empty()) {
    json["writer_gbps"] = gb / median(chosen);
    json["ratio_to_best"] = best_s / median(chosen);
    json["ratio_to_memcpy"] = median(times[kMemcpyForm]) / median(chosen);
  }
  json["isa"] = delta::isa_name();
  return json;
}

}  // namespace deltasync::bench
