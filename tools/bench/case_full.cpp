// bench full: plain transfers into memory over loopback, against a verified full pull from a real agent, over the same
// number of streams and from the same pages: the half that the agent serves.
#include <algorithm>
#include <iterator>
#include <vector>

#include "base/deadline.hpp"
#include "bench/limits.hpp"
#include "bench/processes.hpp"
#include "bench/synth.hpp"
#include "bench/transfers.hpp"
#include "deltasync/receiver.hpp"
#include "deltasync/writer.hpp"
#include "net/tls.hpp"
#include "receiver/targets/target.hpp"
#include "shm/roles.hpp"
#include "shm/segment.hpp"

namespace deltasync::bench {
namespace {

Result<unsigned> active_half(shm::Segment& segment) {
  for (unsigned half = 0; half < 2; ++half) {
    if (shm::inspect_half(segment, half).state == shm::HalfState::active) return half;
  }
  return Error(Errc::internal, "segment " + segment.path().name + " has no active half");
}

Status publish(const std::string& socket, const LayoutPtr& layout, ByteSpan half, unsigned threads) {
  WriterOptions options;
  options.agent_socket = socket;
  options.threads = threads;
  DS_ASSIGN(const auto writer, Writer::attach(layout, make_sidecar(*layout), options, Deadline::after(kCaseLimit)));
  const Version version{{make_epoch(), 1}, "bench"};
  DS_TRY(writer->begin(version, Deadline::after(kCaseLimit)));
  for (std::uint32_t t = 0; t < layout->tensors().size(); ++t) {
    DS_TRY(writer->write(t, Source{half.data() + layout->tensors()[t].offset}));
  }
  DS_ASSIGN([[maybe_unused]] const auto report, writer->commit(Deadline::after(kCaseLimit)));
  return writer->wait_ready(version.id, Deadline::after(kCaseLimit));
}

struct Plain {
  const char* name;
  SendBy by;
  OnPiece on_piece;
};
constexpr Plain kPlain[] = {
    {"sendfile", SendBy::sendfile, OnPiece::nothing}, {"sendfile, digests", SendBy::sendfile, OnPiece::digest},
    {"send", SendBy::send, OnPiece::nothing},         {"send, MSG_ZEROCOPY", SendBy::zerocopy, OnPiece::nothing},
    {"splice", SendBy::splice, OnPiece::nothing},
};
constexpr std::size_t kLimit = 0;
constexpr std::size_t kDigestedLimit = 1;

/// Of the receiver's certificate nothing is said: it has no part in the transfer.
std::string tls_in_words(const Options& options) {
  if (!options.tls.wanted()) return "none";
  const std::string why = options.tls.kernel ? net::why_no_kernel_tls() : "not tried";
  return why.empty() ? "1.3, by the kernel" : "1.3, not by the kernel: " + why;
}

}  // namespace

Result<Json> run_full(const Options& options) {
  ThreadPool pool(options.threads, "bench");
  DS_ASSIGN(const auto layout, decoder_layout(static_cast<std::uint64_t>(options.model_gib * 0x1p30)));
  DS_ASSIGN(const Buffer memory, Buffer::allocate(layout->half_bytes(), pool));
  DS_ASSIGN(const Buffer source, Buffer::allocate(layout->half_bytes(), pool));
  std::fill(source.span().begin(), source.span().end(), std::byte{0});
  SyntheticModel(layout, options.density, options.seed, pool).write_half(source.span());
  DS_ASSIGN(const BenchAgent agent, BenchAgent::start(options));
  DS_TRY(publish(agent.socket(), layout, source.span(), options.threads));
  DS_ASSIGN(const auto segment, shm::Segment::attach({options.shm_dir, agent.segment_name()}));
  DS_ASSIGN(const unsigned half, active_half(*segment));

  ReceiverOptions receiver_options;
  receiver_options.endpoint = agent.endpoint();
  receiver_options.tls.ca = options.tls.ca;
  receiver_options.streams = options.streams;
  receiver_options.threads = options.threads;
  receiver_options.local = false;  // the connection is what is measured
  double pull_s = 1e300;
  std::vector<double> plain_s(std::size(kPlain), 1e300);
  for (unsigned round = 0; round < rounds_of(options); ++round) {
    for (std::size_t i = 0; i < std::size(kPlain); ++i) {
      const auto took = transfer_once(segment->file(), segment->half_file_offset(half), memory.span(), options.streams,
                                      kPlain[i].by, kPlain[i].on_piece);
      if (took.ok()) {
        plain_s[i] = std::min(plain_s[i], *took);
      } else if (took.error().code() != Errc::unsupported) {
        return took.error();
      }
    }
    DS_ASSIGN(const auto receiver, Receiver::connect(receiver_options, Deadline::after(kCaseLimit)));
    DS_TRY(receiver->bind(make_host_target(layout, memory.span()), Deadline::after(kCaseLimit)));
    const Stopwatch watch;
    DS_ASSIGN(const auto staged, receiver->pull({}, Deadline::after(kCaseLimit)));
    DS_TRY(staged->commit());
    pull_s = std::min(pull_s, watch.seconds());
    if (!std::equal(memory.span().begin(), memory.span().end(), source.span().begin())) {
      return Error(Errc::corrupt, "the pulled version differs from the published one");
    }
  }
  const auto bytes = static_cast<double>(layout->half_bytes());
  Json plain = Json::object();
  for (std::size_t i = 0; i < std::size(kPlain); ++i) {
    if (plain_s[i] < 1e300) plain[kPlain[i].name] = bytes / plain_s[i] / 1e9;
  }
  return Json{{"limit_gbps", bytes / plain_s[kLimit] / 1e9},
              {"digested_limit_gbps", bytes / plain_s[kDigestedLimit] / 1e9},
              {"pull_gbps", bytes / pull_s / 1e9},
              {"ratio_to_limit", plain_s[kLimit] / pull_s},
              {"ratio_to_digested_limit", plain_s[kDigestedLimit] / pull_s},
              {"plain_gbps", plain},
              {"tls", tls_in_words(options)},
              {"streams", options.streams}};
}

}  // namespace deltasync::bench
