#include "agent/serve/receiver_table.hpp"

#include <algorithm>
#include <set>
#include <utility>

namespace deltasync::agent {

ReceiverTable::Entry& ReceiverTable::entry_locked(const Key& key, const Peer& peer) {
  const auto [found, is_new] = entries_.try_emplace(key);
  Entry& entry = found->second;
  entry.row.connection = peer.connection;
  entry.row.address = peer.address;
  entry.row.lost = entry.said_goodbye = false;
  if (!is_new) return entry;
  entry.came = ++came_;
  entry.row.name = peer.name;
  entry.row.host = peer.address.substr(0, peer.address.rfind(':'));
  std::set<std::uint32_t> taken;
  for (const auto& [other_key, other] : entries_) {
    if (other_key != key && other.row.name == entry.row.name && other.row.host == entry.row.host) {
      taken.insert(other.row.ordinal);
    }
  }
  while (taken.count(entry.row.ordinal) != 0) ++entry.row.ordinal;
  return entry;
}

void ReceiverTable::report(const Peer& peer, std::uint64_t receiver, Version committed, std::string error) {
  const std::lock_guard lock(mutex_);
  ReceiverRow& row = entry_locked({true, receiver}, peer).row;
  row.committed = std::move(committed);
  row.error = std::move(error);
}

void ReceiverTable::named_base(const Peer& peer, const VersionId& base) {
  const std::lock_guard lock(mutex_);
  ReceiverRow& row = entry_locked({false, peer.connection}, peer).row;
  if (row.committed.id != base) row.committed = {base, {}};
}

void ReceiverTable::goodbye(std::uint64_t connection) {
  const std::lock_guard lock(mutex_);
  for (auto& [key, entry] : entries_) {
    if (entry.row.connection == connection) entry.said_goodbye = true;
  }
}

void ReceiverTable::left(std::uint64_t connection, Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  for (auto& [key, entry] : entries_) {
    if (entry.row.connection != connection) continue;
    entry.row.connection = 0;
    entry.row.left_at = now;
    entry.row.lost = key.first && !entry.said_goodbye;  // others know no goodbye
  }
  forget_locked(now);
}

/// Strangers with a token could come and go with ever new numbers: that must not take memory for ever.
void ReceiverTable::forget_locked(Clock::time_point now) {
  std::erase_if(entries_, [&](const auto& item) {
    return item.second.row.connection == 0 && now - item.second.row.left_at >= remember_;
  });
  std::vector<std::pair<Clock::time_point, Key>> gone;
  for (const auto& [key, entry] : entries_) {
    if (entry.row.connection == 0) gone.emplace_back(entry.row.left_at, key);
  }
  if (gone.size() <= kGoneMax) return;
  std::sort(gone.begin(), gone.end());
  for (std::size_t i = 0; i + kGoneMax < gone.size(); ++i) entries_.erase(gone[i].second);
}

std::vector<ReceiverRow> ReceiverTable::rows(Clock::time_point now) {
  std::vector<Entry> entries;
  {
    const std::lock_guard lock(mutex_);
    forget_locked(now);
    entries.reserve(entries_.size());
    for (const auto& [key, entry] : entries_) entries.push_back(entry);
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.came < b.came; });
  std::vector<ReceiverRow> rows;
  rows.reserve(entries.size());
  for (Entry& entry : entries) rows.push_back(std::move(entry.row));
  return rows;
}

}  // namespace deltasync::agent
