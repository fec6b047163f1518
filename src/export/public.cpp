#include <utility>

#include "deltasync/export.hpp"
#include "export/plan.hpp"

namespace deltasync {

struct ExportFamily::Page {
  exporting::Family family;
};

ExportFamily::ExportFamily(std::shared_ptr<const Page> page) : page_(std::move(page)) {}

const std::string& ExportFamily::name() const noexcept {
  return page_->family.name;
}

const std::vector<std::string>& ExportFamily::architectures() const noexcept {
  return page_->family.architectures;
}

Result<ExportFamily> parse_family(std::string_view toml, std::string_view file) {
  DS_ASSIGN(exporting::Family family, exporting::parse_family(toml, file));
  return ExportFamily(std::make_shared<const ExportFamily::Page>(ExportFamily::Page{std::move(family)}));
}

Result<ExportPlan> plan_export(std::span<const ExportFamily> families, std::string_view config, LayoutPtr layout,
                               std::span<const std::vector<ShardPiece>> shards, std::span<const std::string> ignored) {
  std::vector<exporting::Family> given;
  for (const ExportFamily& family : families) given.push_back(family.page_->family);
  DS_ASSIGN(const std::vector<std::string> architectures, exporting::architectures_of(config));
  DS_ASSIGN(const exporting::Family family, exporting::find_family(given, architectures));
  return exporting::plan_export(family, config, std::move(layout), shards, ignored);
}

}  // namespace deltasync
