// A frame with its two hashes made right, so that the fuzzer reaches what lies behind them: record table and payloads.
#include "fuzz_delta_layout.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace deltasync;
  std::vector<std::byte> bytes(reinterpret_cast<const std::byte*>(data),
                               reinterpret_cast<const std::byte*>(data) + size);
  for (const Layout* layout : {&fuzz::layout(), &fuzz::aligned_layout()}) fuzz::decode_frame(*layout, bytes);
  fuzz::repair_hashes(bytes);
  for (const Layout* layout : {&fuzz::layout(), &fuzz::aligned_layout()}) fuzz::decode_frame(*layout, bytes);
  return 0;
}
