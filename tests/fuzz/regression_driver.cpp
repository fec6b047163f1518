// Replays a committed corpus through one fuzz target, and then, for each input, its truncations and single-byte changes
// up to a budget, so that the regression run covers the neighbourhood of what was found. Exit 1 on an empty corpus.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

// Per input, of each kind. Fewer under sanitizers; with AddressSanitizer libFuzzer goes on from the same inputs.
#ifdef DELTASYNC_SANITIZED
constexpr std::size_t kNeighboursMax = 48;
#else
constexpr std::size_t kNeighboursMax = 512;
#endif

using Bytes = std::vector<std::uint8_t>;

/// A copy of exactly this size, so that AddressSanitizer sees a read past the end.
void run(const Bytes& bytes) {
  const Bytes exact(bytes.begin(), bytes.end());
  LLVMFuzzerTestOneInput(exact.data(), exact.size());
}

void run_neighbours(const Bytes& bytes) {
  const std::size_t step = std::max<std::size_t>(1, bytes.size() / kNeighboursMax);
  for (std::size_t i = 0; i < bytes.size(); i += step) {
    run(Bytes(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(i)));
    for (const std::uint8_t flip : {0x01, 0x80, 0xFF}) {
      Bytes changed = bytes;
      changed[i] ^= flip;
      run(changed);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::size_t inputs = 0;
  for (int i = 1; i < argc; ++i) {
    for (const auto& entry : std::filesystem::directory_iterator(argv[i])) {
      std::ifstream in(entry.path(), std::ios::binary);
      const Bytes bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
      run(bytes);
      run_neighbours(bytes);
      ++inputs;
    }
  }
  std::printf("%zu inputs\n", inputs);
  return inputs == 0 ? 1 : 0;
}
