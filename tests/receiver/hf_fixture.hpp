// What the tests of the directory target share: a temporary directory, a sidecar made by hand, what files must hold.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "deltasync/layout.hpp"
#include "receiver/targets/target.hpp"
#include "tests/support/temp_dir.hpp"

namespace deltasync::test {

/// Two weight files (the second in a subdirectory) with headers of odd lengths, so that their tensors are unaligned,
/// and the layout's tensors dealt out in reverse; three other files, one of them empty.
Sidecar awkward_sidecar(const Layout& layout);

/// The bytes of a weight file for this half.
std::vector<std::byte> weight_file_bytes(const Layout& layout, const Sidecar::File& file,
                                         const std::vector<std::byte>& half);
std::vector<std::byte> read_file(const std::filesystem::path& path);
void write_file(const std::filesystem::path& path, const std::vector<std::byte>& bytes);
/// Empty if the directory holds exactly the files of the sidecar, bit for bit, and nothing else; else what differs.
std::string compare_directory(const std::filesystem::path& directory, const Layout& layout, const Sidecar& sidecar,
                              const std::vector<std::byte>& half);

}  // namespace deltasync::test
