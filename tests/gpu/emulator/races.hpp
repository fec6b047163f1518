// Who touched each byte of memory in a launch: two threads that nothing orders must not use the same byte, unless both
// read it or both do so by atomics. A barrier orders the threads of a block, and nothing else does.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>
#include <unordered_map>

namespace deltasync::emulator {

class Races {
 public:
  enum class Kind : std::uint8_t { read, read_constant, write, atomic };
  struct Thread {
    std::uint64_t block = 0;
    std::uint32_t index = 0;
    std::uint32_t barriers = 0;  ///< that it has passed
  };

  /// The bytes of `used`'s bits, from `address` on, which is aligned to `bytes`. What is wrong, or empty.
  std::string_view touch(std::uintptr_t address, std::uint32_t bytes, std::uint32_t used, Kind kind, Thread thread);
  void clear() { pages_.clear(), last_ = nullptr, last_page_ = ~std::uintptr_t{0}; }

 private:
  /// A thread: block, index, barriers. 0: none.
  using Id = std::uint64_t;
  struct Cell {
    Id writer = 0;
    Id reader = 0;             ///< the last
    bool is_atomic = false;    ///< what the writer did
    bool is_constant = false;  ///< was read as what nobody writes
    bool many_readers = false;
    bool many_blocks = false;  ///< of them
  };
  static constexpr std::uintptr_t kPage = 1024;
  static constexpr std::uintptr_t kWord = 8;
  struct Page {
    std::array<Cell, kPage> cells{};
    /// Of words that several blocks have read: nothing more can be learned from another that reads them.
    std::array<bool, kPage / kWord> settled{};
  };

  static bool same_thread(Id a, Id b) { return a >> 14 == b >> 14; }
  static bool same_block(Id a, Id b) { return a >> 24 == b >> 24; }
  static bool ordered(Id a, Id b) { return same_thread(a, b) || (same_block(a, b) && a % (1 << 14) != b % (1 << 14)); }
  static std::string_view read(Cell& cell, Id id, bool constant);
  static std::string_view write(Cell& cell, Id id, bool atomic);
  Page& page(std::uintptr_t number);

  std::unordered_map<std::uintptr_t, std::unique_ptr<Page>> pages_;
  Page* last_ = nullptr;
  std::uintptr_t last_page_ = ~std::uintptr_t{0};
};

}  // namespace deltasync::emulator
