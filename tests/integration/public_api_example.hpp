// What users write, with nothing but include/deltasync on the include path.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "deltasync/receiver.hpp"
#include "deltasync/writer.hpp"

namespace deltasync::example {

/// A trainer: attaches, publishes `bytes` (all tensors, in layout order, without gaps) and waits until it is served.
Status train(const std::string& agent_socket, const LayoutPtr& layout, const std::vector<std::byte>& bytes,
             const Version& version);

/// A rollout server: pulls the newest version into memory of its own and returns a copy of its tensors, as above.
Result<std::vector<std::byte>> serve_from_memory(const std::string& endpoint);

/// Pulls the newest version into a directory.
Result<PullReport> serve_from_directory(const std::string& endpoint, const std::filesystem::path& out);

}  // namespace deltasync::example
