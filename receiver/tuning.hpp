// The receiver's own waits and sizes. Every wait is also bounded by the caller's deadline.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>

#include "receiver/link.hpp"

namespace deltasync::receiver {

struct Tuning {
  std::chrono::milliseconds handshake{5'000};  ///< connect and authenticate, in all
  std::chrono::milliseconds silence{10'000};   ///< without a single byte where some are due
  /// Where there is another agent to go on at: without a word of one that is to say every now and then that it is
  /// there. A pause of half a second in which it is stopped, or has no time, is not that.
  std::chrono::milliseconds patience{850};
  std::chrono::milliseconds alive{200};         ///< between these words
  std::chrono::milliseconds wait_slice{5'000};  ///< one request to wait for a version; repeated until the deadline
  std::chrono::milliseconds rested{1'000};   ///< a data connection that was not used for so long may have been closed
  std::chrono::milliseconds release{2'000};  ///< for the answer to a release
  /// While a timeline is recorded, a pull first looks at the agent's clock if the last look is older.
  std::chrono::milliseconds clock_look{10'000};
  /// Between two tries of the preferred agent while another one is in use; longer where it fell silent again and again.
  std::chrono::milliseconds preferred_look{10'000};
  /// A preferred agent that is behind is gone back to if its newest version is no older: others come there, too.
  std::chrono::milliseconds lately{10'000};
  /// While the agent in use has nothing newer: between two questions of the others.
  std::chrono::milliseconds others_look{60'000};
  std::chrono::milliseconds parents_look{
      2'000};  ///< between two questions of a relay where its agent has versions from
  std::chrono::milliseconds say_progress{10'000};  ///< between two lines of the log about a full update that takes long
  std::chrono::milliseconds backoff_first{10};
  std::chrono::milliseconds backoff_max{1'000};
  std::chrono::milliseconds busy_first{500};  ///< the same where the agent says that it is busy
  std::chrono::milliseconds busy_max{10'000};
  std::uint64_t item_bytes = 8u << 20;          ///< bytes of a half that one request asks for
  std::uint64_t frame_item_bytes = 1u << 20;    ///< bytes of frames that one request asks for
  std::uint64_t packed_item_bytes = 32u << 20;  ///< the same where they come packed: the agent packs ahead within one
  std::uint64_t probe_bytes = 8u << 20;         ///< of a full update, to measure a link that is not known; then twice
                                                ///< as many, and so on, as long as it gets faster
  std::uint64_t packed_portion_bytes = 256u << 20;            ///< after which packing has to prove itself
  std::uint64_t link_sample_bytes = LinkMeter::kSampleBytes;  ///< that say how fast a link is
  std::uint64_t piece_bytes = 128u << 10;                     ///< received, then verified while still in cache
  std::uint32_t layout_attempts = 3;       ///< answers that are no layout message, then connecting fails
  std::uint32_t tile_attempts = 3;         ///< raw copies asked for until a tile is right
  std::uint32_t stream_strikes = 5;        ///< broken messages on one stream in a row, then the pull fails
  std::uint32_t refused_plans = 8;         ///< plans that end neither whole nor revoked, then the pull fails
  std::function<void()> after_local_copy;  ///< tests: on each thread, before it looks whether what it copied counts
  std::optional<bool> compact;             ///< ask for deltas in exponent classes; unset: where the link makes them pay
};

}  // namespace deltasync::receiver
