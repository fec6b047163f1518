// The conversation of a rank with the coordinator of its group.
#include "format/wire_commit.hpp"

#include "format/want.hpp"
#include "format/wire_codec.hpp"

namespace deltasync::wire {
namespace {

void put_transaction(ByteWriter& out, const commit::TransactionId& id) {
  out.put(id.term);
  out.put(id.number);
}

commit::TransactionId get_transaction(Decoder& in) {
  commit::TransactionId id;
  id.term = in.get<std::uint64_t>();
  id.number = in.get<std::uint64_t>();
  return id;
}

}  // namespace

std::vector<std::byte> RankJoin::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  out.put(protocol);
  out.put(rank);
  out.put(ranks);
  out.put(incarnation);
  out.append(bytes_of(nonce));
  out.append(bytes_of(proof));
  out.put_string(cut(name, kPeerNameBytesMax));
  return bytes;
}
Result<RankJoin> RankJoin::decode(ByteSpan payload) {
  Decoder in(payload, "rank_join");
  RankJoin m;
  m.protocol = in.get<std::uint16_t>();
  m.rank = in.get<std::uint32_t>();
  m.ranks = in.get<std::uint32_t>();
  m.incarnation = in.get<std::uint64_t>();
  m.nonce = in.array<32>();
  m.proof = in.array<32>();
  m.name = in.string(kPeerNameBytesMax, "name");
  return in.finish(std::move(m));
}

std::vector<std::byte> RankWelcome::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  out.append(bytes_of(proof));
  out.put(log);
  out.put(term);
  out.put(incarnation);
  return bytes;
}
Result<RankWelcome> RankWelcome::decode(ByteSpan payload) {
  Decoder in(payload, "rank_welcome");
  RankWelcome m;
  m.proof = in.array<32>();
  m.log = in.get<std::uint64_t>();
  m.term = in.get<std::uint64_t>();
  m.incarnation = in.get<std::uint64_t>();
  return in.finish(m);
}

std::vector<std::byte> RankReport::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  out.put(report.rank);
  out.put(report.incarnation);
  out.put(report.step);
  out.put(code_of(report.state));
  out.put<std::uint8_t>(report.busy ? 1 : 0);
  out.put(code_of(report.phase));
  put_transaction(out, report.transaction);
  out.put(report.round);
  put_version(out, report.staged);
  put_digest(out, report.staged_root);
  put_digest(out, report.subscription);
  put_version_id(out, report.holds);
  out.put(code_of(report.code == Errc::cancelled ? Errc::aborted : report.code));  // cancelled is never sent
  out.put_string(cut(report.problem, commit::kProblemBytesMax));
  out.put(report.log);
  return bytes;
}
Result<RankReport> RankReport::decode(ByteSpan payload) {
  Decoder in(payload, "rank_report");
  RankReport m;
  commit::Report& r = m.report;
  r.rank = in.get<std::uint32_t>();
  r.incarnation = in.get<std::uint64_t>();
  r.step = in.get<std::uint64_t>();
  r.state = in.enumerator(commit::RankState::paused, commit::RankState::in_doubt, "state");
  r.busy = in.flag("busy") != 0;
  r.phase = in.enumerator(commit::Phase::none, commit::Phase::rolling_back, "phase");
  r.transaction = get_transaction(in);
  r.round = in.get<std::uint32_t>();
  r.staged = in.version();
  r.staged_root = in.digest();
  r.subscription = in.digest();
  r.holds = in.version_id();
  r.code = in.enumerator(Errc::invalid_argument, Errc::internal, "code");
  r.problem = in.string(commit::kProblemBytesMax, "problem");
  r.log = in.get<std::uint64_t>();
  return in.finish(std::move(m));
}

namespace {

enum class OrderedWant : std::uint8_t { newest, newer, number, label };

/// What belongs to another kind is left out.
void put_want(ByteWriter& out, const Want& want) {
  const WantKind kind = kind_of(want);
  out.put(static_cast<std::uint8_t>(static_cast<std::uint8_t>(kind) - static_cast<std::uint8_t>(WantKind::newest)));
  out.put(want.number.value_or(0));
  out.put(kind == WantKind::number ? want.epoch : 0);
  out.put_string(kind == WantKind::label ? cut(want.label, kLabelBytesMax) : std::string_view());
}

Want get_want(Decoder& in) {
  const auto kind = in.enumerator(OrderedWant::newest, OrderedWant::label, "want");
  Want want;
  const auto number = in.get<std::uint64_t>();
  want.epoch = in.get<std::uint64_t>();
  want.label = in.label();
  want.newer = kind == OrderedWant::newer;
  if (kind == OrderedWant::number) want.number = number;
  if (kind != OrderedWant::number && (number != 0 || want.epoch != 0)) in.reject("want", "a number that is not wanted");
  if ((kind == OrderedWant::label) == want.label.empty()) in.reject("want", "a label where none is wanted, or none");
  return want;
}

}  // namespace

std::vector<std::byte> RankOrder::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  out.put(order.log);
  out.put(order.term);
  out.put(order.step);
  out.put(order.incarnation);
  out.put(code_of(order.kind));
  put_transaction(out, order.transaction);
  out.put(order.round);
  put_want(out, order.want);
  put_version_id(out, order.exact);
  put_version(out, order.version);
  return bytes;
}
Result<RankOrder> RankOrder::decode(ByteSpan payload) {
  Decoder in(payload, "rank_order");
  RankOrder m;
  commit::Order& o = m.order;
  o.log = in.get<std::uint64_t>();
  o.term = in.get<std::uint64_t>();
  o.step = in.get<std::uint64_t>();
  o.incarnation = in.get<std::uint64_t>();
  o.kind = in.enumerator(commit::OrderKind::none, commit::OrderKind::expel, "kind");
  o.transaction = get_transaction(in);
  o.round = in.get<std::uint32_t>();
  o.want = get_want(in);
  o.exact = in.version_id();
  o.version = in.version();
  return in.finish(std::move(m));
}

}  // namespace deltasync::wire
