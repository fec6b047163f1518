#include "receiver/local/local_half.hpp"

#include <chrono>
#include <utility>

#include "base/log.hpp"
#include "net/blocking.hpp"
#include "net/peer_user.hpp"
#include "receiver/control.hpp"
#include "shm/segment_view.hpp"

namespace deltasync::receiver {
namespace {

constexpr auto kDescriptorLimit = std::chrono::seconds(2);  ///< of an agent that is asked for a descriptor

Result<UniqueFd> ask_for_segment(const wire::Local& at, std::uint64_t instance, const CallContext& until) {
  DS_ASSIGN(UniqueFd fd, net::connect_unix(at.socket, until));
  // Who made a socket there may be anybody.
  DS_TRY(net::check_peer_user(fd.get(), "the agent on " + at.socket, "this receiver"));
  net::MessageSocket socket(std::move(fd));
  socket.stop_on(until.stop());
  socket.accept_files();
  constexpr std::uint64_t kRequest = 1;
  const wire::MapSegment question{wire::kProtocolVersion, instance, at.generation};
  DS_TRY(socket.send(kRequest, question, until.deadline()));
  DS_TRY(socket.recv_answer(kRequest, wire::Type::segment, until.deadline()));
  UniqueFd file = socket.take_file();
  if (!file) return Error(Errc::protocol, "the agent sent no descriptor");
  return file;
}

}  // namespace

LocalHalf::LocalHalf(std::unique_ptr<const shm::SegmentView> segment, const wire::Local& at)
    : segment_(std::move(segment)), half_(at.half), sequence_(at.sequence), bytes_(segment_->half(half_)) {}

LocalHalf::~LocalHalf() = default;

Result<std::unique_ptr<LocalHalf>> LocalHalf::map(const wire::Local& at, std::uint64_t instance, const Layout& layout,
                                                  const CallContext& until) {
  const CallContext limit = until.earlier(Deadline::after(kDescriptorLimit));
  auto file = ask_for_segment(at, instance, limit);
  if (!file) return std::move(file).error().with_context("the agent's socket " + at.socket);
  DS_ASSIGN(std::unique_ptr<const shm::SegmentView> segment, shm::SegmentView::map(*file));
  if (segment->generation() != at.generation) {
    return Error(Errc::corrupt, "the agent handed over generation " + std::to_string(segment->generation()) + ", not " +
                                    std::to_string(at.generation));
  }
  if (segment->layout_digest() != layout.digest() || segment->half(at.half).size() != layout.half_bytes()) {
    return Error(Errc::layout_mismatch, "the agent handed over a segment of layout " +
                                            to_string(segment->layout_digest()) + ", not " +
                                            to_string(layout.digest()));
  }
  return std::unique_ptr<LocalHalf>(new LocalHalf(std::move(segment), at));
}

bool LocalHalf::still_there() const noexcept {
  return segment_->still_holds(half_, sequence_);
}

bool LocalPulls::is_wanted(const Control& control) const {
  return wanted_.value_or(control.same_host());
}

Result<bool> LocalPulls::tries(const Control& control) {
  if (!is_wanted(control)) return false;
  if (control.protocol() >= 5) return true;
  DS_TRY(give_up(Error(Errc::unsupported, "the agent speaks protocol " + std::to_string(control.protocol()))));
  return false;
}

Status LocalPulls::give_up(const Error& why) {
  if (wanted_ == true) {
    return Error(Errc::unsupported, "the agent's memory (option local) cannot be had: " + why.to_string());
  }
  std::string reason = why.to_string();
  if (reason == said_) return {};
  log::warn("local_pull_failed agent={} error=\"{}\" then=\"over the connection\"", peer_.endpoint(), reason);
  said_ = std::move(reason);
  return {};
}

}  // namespace deltasync::receiver
