// What the public plan_export() (deltasync/export.hpp) is made of, and plans and shards as JSON. Pure: no file, no
// memory of a trainer.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "deltasync/export.hpp"
#include "deltasync/layout.hpp"
#include "deltasync/result.hpp"
#include "export/family.hpp"

namespace deltasync::exporting {

/// As the public one, by this page.
Result<ExportPlan> plan_export(const Family& family, std::string_view config, LayoutPtr layout,
                               std::span<const std::vector<ShardPiece>> shards,
                               std::span<const std::string> ignored = {});

/// The architectures that config.json names.
Result<std::vector<std::string>> architectures_of(std::string_view config);

/// A rank's pieces from {"rank": 0, "pieces": [{"key", "dtype", "global_shape", "offset", "shape"}, …]}, and its
/// number.
Result<std::pair<std::uint32_t, std::vector<ShardPiece>>> parse_shard(std::string_view json, std::string_view file);

/// As docs/reference/export.md has it.
std::string to_json(const ExportPlan& plan);

}  // namespace deltasync::exporting
