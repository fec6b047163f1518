// How one agent is set up. Field by field what `deltasync-agent --help` says.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "agent/versions/scrub.hpp"
#include "delta/delta.hpp"

namespace deltasync::agent {

/// What recent deltas may take where nobody says otherwise.
constexpr std::uint64_t default_ring_bytes(std::uint64_t half_bytes) noexcept {
  return half_bytes / 20;
}

/// How many connections the pull server has places for.
struct AdmissionLimits {
  std::size_t receivers_max = 4096;          ///< control and watch connections
  std::size_t data_max = 4096;               ///< data connections: those of receivers that are pulling
  std::size_t children_max = 0;              ///< that pull from here, others are sent on; 0: any number
  std::size_t strangers_max = 1024;          ///< connections that have not authenticated yet
  std::size_t strangers_per_address = 128;   ///< of one IPv4 address or IPv6 /64
  std::size_t strangers_per_loopback = 512;  ///< the same for each loopback address
};

/// What the core needs to know.
struct CoreOptions {
  std::string name = "deltasync";  ///< segments are <shm_dir>/<name>.g<generation>
  std::filesystem::path shm_dir = "/dev/shm";
  unsigned threads = 2;              ///< that diff and encode, the publisher included
  unsigned overlap_threads = 2;      ///< that do so while a writer writes, at low priority; 0: only after the seal
  unsigned pack_threads = 2;         ///< that pack tiles for slow links, at low priority; 0: none are packed
  std::uint64_t ring_bytes_max = 0;  ///< 0: default_ring_bytes()
  std::size_t ring_entries_max = 256;
  std::uint64_t merge_bytes_max = 0;  ///< of merged and compact deltas that are kept; 0: as much as the ring's
  std::size_t merge_steps_min = 2;    ///< shorter chains are not merged; 0: none is, and no delta is made compact
  std::chrono::milliseconds lease_grace{1000};  ///< readers of a half that a writer waits for keep it this long at most
  std::chrono::milliseconds relay_grace{
      10'000};                               ///< at the start, for the relay of versions that were found to be back
  std::uint64_t copy_bytes_max = 64u << 20;  ///< of pieces that are copied out of a half for peers that lost a lease
  std::chrono::milliseconds plan_limit{600'000};  ///< a plan and its lease end after this
  std::size_t plans_per_connection_max = 8;
  std::uint64_t peer_bytes_max = 192u << 20;  ///< of all else that peers make the agent hold
  delta::ValueForm form = delta::ValueForm::ulp;
  ScrubOptions scrub;
  std::function<void()> before_overlapped_diff;     ///< tests: on the thread of the overlapped diff
  std::function<void()> before_merge;               ///< tests: on each thread that makes deltas
  std::function<void()> before_plan_counts;         ///< tests: on a plan's thread, once its leases have begun
  std::function<void()> before_pack;                ///< tests: on a packing thread, which has its copy
  std::function<void()> before_unmap;               ///< tests: on the thread that unmaps generations
  bool low_memory = false;                          ///< release the old generation before a new one is made
  std::chrono::milliseconds release_limit{20'000};  ///< which waits so long for its readers
};

/// Limits of the pull server's conversations.
struct PullLimits {
  std::chrono::milliseconds handshake{5'000};        ///< connect → authenticated
  std::chrono::milliseconds message{60'000};         ///< first byte of a request → its last
  std::chrono::milliseconds idle{3'600'000};         ///< between requests
  std::chrono::milliseconds data_idle{10'000};       ///< the same on data connections
  std::chrono::milliseconds progress{30'000};        ///< without the peer taking a byte
  std::chrono::milliseconds wait_max{3'600'000};     ///< longest PlanRequest::wait_ms that is honoured
  std::chrono::milliseconds merge_wait_max{10'000};  ///< that a plan waits for a merge, and half of its wait_ms at most
  std::chrono::milliseconds room{10'000};            ///< that a request or an answer waits for memory
  std::chrono::milliseconds pack{1'000};             ///< that tiles wait to be packed, then they go as they are
  std::chrono::milliseconds check{5'000};            ///< for damaged tiles to be published again
  std::chrono::milliseconds child_silence{120'000};  ///< then others may have its place; who waits asks every 40 s
  std::chrono::milliseconds remember{600'000};       ///< a receiver that has left, for the status pages
  AdmissionLimits admission;
  std::size_t ucx_connections_max = 256;  ///< 1.25 GiB, 3,072 descriptors
  int keepalive_idle_s = 60;
};

}  // namespace deltasync::agent
