// What the agent knows of its receivers: which version each has committed, and what went wrong with it last. A receiver
// says so itself (`report`, protocol 5); of one of protocol 4 the base of its plans tells. Thread-safe, bounded.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "deltasync/version.hpp"

namespace deltasync::agent {

/// One receiver.
struct ReceiverRow {
  std::string name;              ///< as it calls itself; printable
  std::string host;              ///< its address without the port
  std::uint32_t ordinal = 0;     ///< tells it from others of that name on that host: the smallest that was free
  std::string address;           ///< of its last control connection
  std::uint64_t connection = 0;  ///< that connection; 0: it has left
  Version committed;             ///< epoch 0: nothing
  std::string error;             ///< of its last pull or commit; empty: that succeeded
  std::chrono::steady_clock::time_point left_at;  ///< if it has left
  bool lost = false;  ///< it has left without a goodbye, which it would have said if it could
};

class ReceiverTable {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::size_t kGoneMax = 256;  ///< that have left and are remembered

  /// Receivers that have left are forgotten after `remember`.
  explicit ReceiverTable(std::chrono::milliseconds remember) : remember_(remember) {}

  /// Which receiver reports.
  struct Peer {
    std::uint64_t connection = 0;
    std::string name;
    std::string address;  ///< with the port
  };
  /// `receiver`: the same on all connections of a receiver.
  void report(const Peer& peer, std::uint64_t receiver, Version committed, std::string error);
  /// Of a receiver that does not report: there is one for each connection.
  void named_base(const Peer& peer, const VersionId& base);
  /// The receiver of this connection ends: it will not be lost.
  void goodbye(std::uint64_t connection);
  /// The connection is over.
  void left(std::uint64_t connection, Clock::time_point now = Clock::now());

  /// In the order in which they came.
  std::vector<ReceiverRow> rows(Clock::time_point now = Clock::now());

 private:
  /// True: the second number is a receiver's own; else it is a connection's.
  using Key = std::pair<bool, std::uint64_t>;
  struct Entry {
    ReceiverRow row;
    std::uint64_t came = 0;
    bool said_goodbye = false;
  };
  Entry& entry_locked(const Key& key, const Peer& peer);
  void forget_locked(Clock::time_point now);

  const std::chrono::milliseconds remember_;
  std::mutex mutex_;
  std::map<Key, Entry> entries_;  // protected by mutex_, as the next one
  std::uint64_t came_ = 0;
};

}  // namespace deltasync::agent
