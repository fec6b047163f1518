// What a progress thread does for a link: sends, hears, connects and ends. libucp's callbacks come here.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/log.hpp"
#include "net/ucx/link.hpp"
#include "net/ucx/transports.hpp"

namespace deltasync::net::ucx {
namespace {

constexpr unsigned kTurns = 32;                      ///< of one link before others have theirs
constexpr unsigned kRequestsMax = 16;                ///< under way at once
constexpr auto kLinger = std::chrono::seconds(10);   ///< to send what was put, once the channel is gone
constexpr auto kAbandon = std::chrono::seconds(15);  ///< libucp ends its requests in far less
constexpr std::size_t kTransportsMax = 32;
constexpr std::size_t kPiecesMax = 16384;  ///< that came out of order: far more than kRequestsMax leave room for

}  // namespace

Link::Pumped Link::pump() {
  if (!started_) start();
  for (unsigned turn = 0; turn < kTurns; ++turn) {
    bool busy = post();
    busy |= fetch();
    busy |= lib_.worker_progress(worker_) != 0;
    if (greeted_) check_transports();
    if (busy) continue;
    if (may_go()) return Pumped::over;
    const UcsStatus armed = lib_.worker_arm(worker_);
    if (armed == kOk) return Pumped::idle;
    if (armed == kBusy) continue;
    if (!failed_) fail("ucp_worker_arm", armed);
    return Pumped::idle;
  }
  return Pumped::again;
}

void Link::start() {
  started_ = true;
  EpParams params{};
  params.field_mask = kEpAddress | kEpErrorMode | kEpErrorHandler;
  params.address = reinterpret_cast<const Address*>(peer_.address.data());
  params.err_mode = kErrorsOfPeer;
  params.err_handler.cb = on_error;
  params.err_handler.arg = this;
  const UcsStatus made = lib_.ep_create(worker_, &params, &ep_);
  if (made != kOk) {
    ep_ = nullptr;
    return fail("reach the other side (UCX_TLS and UCX_NET_DEVICES of both ends must have a transport in common)",
                made);
  }
  send(Kind::hello, 0, nullptr, 0);
}

/// True if anything was sent.
bool Link::post() {
  if (ep_ == nullptr || failed_) return false;
  bool any = false;
  std::uint64_t put = 0;
  std::uint64_t taken = 0;
  std::uint64_t ready = 0;
  {
    const std::lock_guard lock(mutex_);
    put = put_;
    taken = taken_;
    ready = ready_;
  }
  if (leaves_with_ && (said_leave_ || ready >= *leaves_with_)) {
    leaves_with_.reset();
    any |= send(Kind::left, 0, nullptr, 0);
  }
  if (taken - told_taken_ >= kWindowBytes / 4) {
    told_taken_ = taken;
    any |= send(Kind::taken, taken, nullptr, 0);
  }
  const std::uint64_t end = std::min(put, taken_there_ + kWindowBytes);
  while (!failed_ && sent_ < end && requests_ < kRequestsMax) {
    const std::uint64_t bytes = std::min({end - sent_, kMessageBytes, until_wrap(sent_)});
    const std::uint64_t begin = sent_;
    sent_ += bytes;
    any |= send(Kind::data, begin, &out_[begin % kWindowBytes], static_cast<std::size_t>(bytes));
  }
  return any;
}

bool Link::send(Kind kind, std::uint64_t number, const std::byte* data, std::size_t bytes) {
  auto what = std::make_unique<Sending>(Sending{this, {peer_.id, kind, 0, number}, number + bytes});
  RequestParams params{};
  params.op_attr_mask = kRequestCall | kRequestUserData;
  params.cb.send = on_sent;
  params.user_data = what.get();
  void* const returned = lib_.am_send(ep_, kMessageId, &what->head, sizeof what->head, data, bytes, &params);
  if (returned == nullptr) {
    sent(*what, kOk);
  } else if (is_error(returned)) {
    sent(*what, status_of(returned));
  } else {
    ++requests_;
    static_cast<void>(what.release());  // on_sent has it
  }
  return true;
}

void Link::on_sent(void* request, UcsStatus status, void* user_data) {
  const std::unique_ptr<Sending> what(static_cast<Sending*>(user_data));
  --what->link->requests_;
  what->link->lib_.request_free(request);
  what->link->sent(*what, status);
}

void Link::sent(const Sending& what, UcsStatus status) {
  if (status != kOk) return fail("send", status);
  if (what.head.kind != Kind::data) return;
  gone_.emplace(what.head.number, what.end);
  const std::lock_guard lock(mutex_);
  for (auto first = gone_.begin(); first != gone_.end() && first->first == done_; first = gone_.erase(first)) {
    done_ = first->second;
  }
  wake_locked();
}

UcsStatus Link::on_message(void* arg, const void* header, std::size_t header_bytes, void* data, std::size_t bytes,
                           const MessageParams* params) {
  Link* const link = static_cast<Link*>(arg);
  Head head{};
  if (header_bytes != sizeof head) return kOk;
  std::memcpy(&head, header, sizeof head);
  if (head.id != link->offer_.id) return kOk;  // of somebody else: as if it had not come
  return link->heard(head, data, bytes, (params->recv_attr & kMessageRendezvous) != 0);
}

UcsStatus Link::heard(const Head& head, void* data, std::size_t bytes, bool rendezvous) {
  switch (head.kind) {
    case Kind::hello: greeted_ = true; return kOk;
    case Kind::taken:
      if (head.number < taken_there_ || head.number > sent_) break;
      taken_there_ = head.number;
      return kOk;
    case Kind::leave:
      if (std::exchange(heard_leave_, true)) break;
      leaves_with_ = head.number;
      may_leave_ = true;
      return kOk;
    case Kind::left: may_leave_ = true; return kOk;
    case Kind::data: {
      if (pieces_.size() >= kPiecesMax || !expects(head.number, bytes)) break;
      pieces_.emplace(head.number, Piece{head.number + bytes, false});
      if (rendezvous) {
        described_.push_back({data, head.number, bytes});
        return kUnderWay;
      }
      std::memcpy(&in_[head.number % kWindowBytes], data, bytes);
      here(head.number);
      return kOk;
    }
  }
  fail(Error(Errc::protocol, "UCX: the other side sent what no channel sends"));
  return kOk;
}

/// It fits into what is free, and nothing else is there or coming.
bool Link::expects(std::uint64_t begin, std::size_t bytes) const {
  if (bytes == 0 || bytes > kMessageBytes || bytes > until_wrap(begin)) return false;
  {
    const std::lock_guard lock(mutex_);
    if (begin < ready_ || begin > taken_ + kWindowBytes || begin + bytes > taken_ + kWindowBytes) return false;
  }
  const auto next = pieces_.lower_bound(begin);
  if (next != pieces_.end() && next->first < begin + bytes) return false;
  return next == pieces_.begin() || std::prev(next)->second.end <= begin;
}

void Link::here(std::uint64_t begin) {
  pieces_.at(begin).here = true;
  const std::lock_guard lock(mutex_);
  for (auto first = pieces_.begin(); first != pieces_.end() && first->first == ready_ && first->second.here;
       first = pieces_.erase(first)) {
    ready_ = first->second.end;
  }
  wake_locked();
}

/// Rendezvous: the bytes come from the other side's memory as the transport can, into ours. True if any was begun.
bool Link::fetch() {
  if (described_.empty()) return false;
  for (const Described& one : std::exchange(described_, {})) {
    if (failed_) {
      lib_.am_data_release(worker_, one.data);
      continue;
    }
    auto what = std::make_unique<Fetching>(Fetching{this, one.begin});
    RequestParams params{};
    params.op_attr_mask = kRequestCall | kRequestUserData;
    params.cb.recv_am = on_fetched;
    params.user_data = what.get();
    void* const returned = lib_.am_recv_data(worker_, one.data, &in_[one.begin % kWindowBytes], one.bytes, &params);
    if (returned == nullptr) {
      here(one.begin);
    } else if (is_error(returned)) {
      fail("receive", status_of(returned));
    } else {
      ++requests_;
      static_cast<void>(what.release());  // on_fetched has it
    }
  }
  return true;
}

void Link::on_fetched(void* request, UcsStatus status, std::size_t /*bytes*/, void* user_data) {
  const std::unique_ptr<Fetching> what(static_cast<Fetching*>(user_data));
  --what->link->requests_;
  what->link->lib_.request_free(request);
  if (status != kOk) return what->link->fail("receive", status);
  what->link->here(what->begin);
}

void Link::on_error(void* arg, Ep* /*ep*/, UcsStatus status) {
  static_cast<Link*>(arg)->fail("the other side", status);
}

void Link::check_transports() {
  greeted_ = false;
  if (ep_ == nullptr || failed_) return;
  std::vector<Transport> entries(kTransportsMax);
  EpAttributes attributes{};
  attributes.field_mask = kEpTransports;
  attributes.transports.entries = entries.data();
  attributes.transports.num_entries = static_cast<unsigned>(entries.size());
  attributes.transports.entry_size = sizeof(Transport);
  if (const UcsStatus status = lib_.ep_query(ep_, &attributes); status != kOk) return fail("ucp_ep_query", status);
  entries.resize(std::min<std::size_t>(attributes.transports.num_entries, entries.size()));
  std::string names;
  std::optional<Error> refused;
  for (const Transport& one : entries) {
    const std::string name = std::string(one.transport_name) + "/" + one.device_name;
    add_names(names, name);
    if (!refused && !wanted_.empty() && !is_wanted(one.transport_name, wanted_)) refused = not_wanted(name, wanted_);
  }
  if (refused) return fail(*std::move(refused));
  const std::lock_guard lock(mutex_);
  transports_ = std::move(names);
  connected_ = true;
  wake_locked();
}

/// A close may throw away what the other side's libucp has not read yet.
bool Link::is_all_heard(std::uint64_t put) {
  if (sent_ < put && !may_leave_) return false;
  if (!std::exchange(said_leave_, true)) send(Kind::leave, put, nullptr, 0);
  return may_leave_ && !leaves_with_ && requests_ == 0;
}

/// Ends what is to end, step by step. True once nothing of UCX's is under way for a channel that is gone.
bool Link::may_go() {
  bool leaving = false;
  bool lingers = false;
  std::uint64_t put = 0;
  {
    const std::lock_guard lock(mutex_);
    leaving = leaving_;
    lingers = lingers_;
    put = put_;
  }
  if (!leaving && !failed_) return false;
  const auto now = Clock::now();
  if (leaving && !leaves_at_) leaves_at_ = now;
  if (ep_ != nullptr && leaving && lingers && !failed_ && !is_all_heard(put)) {
    if (now < *leaves_at_ + kLinger) return false;
    log::warn("ucx_end_unheard sent={} of={}", sent_, put);
  }
  close_endpoint();
  if (!leaving) return false;
  if (close_ != nullptr && lib_.request_check_status(close_) != kUnderWay) {
    lib_.request_free(std::exchange(close_, nullptr));
  }
  if (close_ == nullptr && requests_ == 0) return true;
  if (now < *leaves_at_ + kAbandon) return false;
  log::error("ucx_worker_abandoned requests={}", requests_);
  abandoned_ = true;
  return true;
}

void Link::close_endpoint() {
  if (ep_ == nullptr) return;
  for (const Described& one : std::exchange(described_, {})) lib_.am_data_release(worker_, one.data);
  RequestParams params{};
  params.op_attr_mask = kRequestFlags;
  params.flags = kCloseForced;
  void* const returned = lib_.ep_close(std::exchange(ep_, nullptr), &params);
  close_ = is_error(returned) ? nullptr : returned;
}

void Link::halt() {
  leave(false);
  fail(Error(Errc::connection, "UCX has been closed in this process"));
}

}  // namespace deltasync::net::ucx
