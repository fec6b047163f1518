#include "agent/serve/admission.hpp"

#include <algorithm>
#include <utility>

namespace deltasync::agent {

namespace ip = boost::asio::ip;

namespace {

/// IPv4 in IPv6's clothes is what it is.
ip::address unmapped(const ip::address& address) {
  if (!address.is_v6() || !address.to_v6().is_v4_mapped()) return address;
  return ip::make_address_v4(ip::v4_mapped, address.to_v6());
}

/// What one stranger has one of: of IPv6 it has a whole /64.
std::string origin_of(const ip::address& address) {
  if (address.is_v4()) return address.to_string();
  auto bytes = address.to_v6().to_bytes();
  std::fill(bytes.begin() + 8, bytes.end(), static_cast<unsigned char>(0));
  return ip::address_v6(bytes).to_string();
}

}  // namespace

std::optional<std::uint64_t> Admission::come(std::uint64_t id, const ip::address& from) {
  const ip::address address = unmapped(from);
  const Origin origin = strangers_.try_emplace(origin_of(address)).first;
  const std::optional<std::uint64_t> leaves = make_room(origin, address.is_loopback());
  origin->second.insert(id);
  ++stranger_count_;
  places_.emplace(id, Place{Kind::stranger, origin->first});
  if (leaves) leave(*leaves);
  return leaves;
}

std::optional<std::uint64_t> Admission::make_room(Origin origin, bool loopback) {
  const std::size_t own_max = loopback ? limits_.strangers_per_loopback : limits_.strangers_per_address;
  if (!origin->second.empty() && origin->second.size() >= own_max) return *origin->second.begin();
  if (stranger_count_ < limits_.strangers_max) return std::nullopt;
  const auto most = std::max_element(strangers_.begin(), strangers_.end(),
                                     [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
  if (most->second.empty()) return std::nullopt;  // nobody is there at all
  return *most->second.begin();
}

Admission::Verdict Admission::settle(std::uint64_t id, Kind kind) {
  const auto found = places_.find(id);
  if (found == places_.end()) return Verdict::left;
  if (count(kind) >= most(kind)) return Verdict::busy;
  forget_stranger(id, found->second.origin);
  found->second.kind = kind;
  ++(kind == Kind::data ? data_count_ : receiver_count_);
  return Verdict::admitted;
}

void Admission::leave(std::uint64_t id) {
  const auto found = places_.find(id);
  if (found == places_.end()) return;
  switch (found->second.kind) {
    case Kind::stranger: forget_stranger(id, found->second.origin); break;
    case Kind::receiver: --receiver_count_; break;
    case Kind::data: --data_count_; break;
  }
  places_.erase(found);
}

void Admission::forget_stranger(std::uint64_t id, const std::string& origin) {
  const Origin found = strangers_.find(origin);
  found->second.erase(id);
  if (found->second.empty()) strangers_.erase(found);
  --stranger_count_;
}

std::size_t Admission::count(Kind kind) const noexcept {
  switch (kind) {
    case Kind::stranger: return stranger_count_;
    case Kind::receiver: return receiver_count_;
    case Kind::data: return data_count_;
  }
  return 0;
}

std::size_t Admission::most(Kind kind) const noexcept {
  switch (kind) {
    case Kind::stranger: return limits_.strangers_max;
    case Kind::receiver: return limits_.receivers_max;
    case Kind::data: return limits_.data_max;
  }
  return 0;
}

}  // namespace deltasync::agent
