// `deltasync export-plan`: which bytes of a trainer's shards are which of a model directory.
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "export/plan.hpp"
#include "tools/cli/cli.hpp"

namespace deltasync::cli {
namespace {

struct ExportPlanArgs {
  std::string hf;
  std::vector<std::string> families;
  std::vector<std::string> shards;
  std::vector<std::string> ignored;
  std::string json;
};

/// Each rank's pieces at its number.
Result<std::vector<std::vector<ShardPiece>>> read_shards(const std::vector<std::string>& files) {
  std::map<std::uint32_t, std::string> from;
  std::vector<std::vector<ShardPiece>> shards(files.size());
  for (const std::string& file : files) {
    DS_ASSIGN(const std::string text, read_text(file));
    DS_ASSIGN(auto shard, exporting::parse_shard(text, file));
    const auto [there, fresh] = from.emplace(shard.first, file);
    if (!fresh) {
      return Error(Errc::invalid_argument,
                   there->second + " and " + file + " are both of rank " + std::to_string(shard.first));
    }
    if (shard.first >= files.size()) {
      return Error(Errc::invalid_argument, file + " is of rank " + std::to_string(shard.first) + ", and there are " +
                                               std::to_string(files.size()) + " files: give those of all ranks");
    }
    shards[shard.first] = std::move(shard.second);
  }
  return shards;
}

/// A page in a file; or, if there is none, one that comes along and is called so, for any architecture.
Result<exporting::Family> family_called(const std::string& said, const std::vector<std::string>& architectures) {
  std::error_code ignored;
  std::string names;
  if (!std::filesystem::exists(said, ignored)) {
    for (const auto& [file, text] : exporting::builtin_families()) {
      DS_ASSIGN(exporting::Family family, exporting::parse_family(text, file));
      names += (names.empty() ? "" : ", ") + family.name;
      if (family.name != said) continue;
      family.architectures = architectures;
      return family;
    }
  }
  auto text = read_text(said);
  if (!text) return std::move(text).error().with_context("neither a file nor one of " + names);
  return exporting::parse_family(*text, said);
}

Result<exporting::Family> family_for(const ExportPlanArgs& options, const std::string& config) {
  DS_ASSIGN(const std::vector<std::string> architectures, exporting::architectures_of(config));
  std::vector<exporting::Family> given;
  for (const std::string& said : options.families) {
    DS_ASSIGN(exporting::Family family, family_called(said, architectures));
    given.push_back(std::move(family));
  }
  return exporting::find_family(given, architectures);
}

Status write_text(const std::string& path, const std::string& text) {
  errno = 0;
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text << '\n';
  file.close();
  if (!file) return Error::from_errno(path, errno != 0 ? errno : EIO);
  return {};
}

Status run_export_plan(const ExportPlanArgs& options) {
  DS_ASSIGN(const HfModel model, HfModel::open(options.hf));
  DS_ASSIGN(const std::string config, read_text((std::filesystem::path(options.hf) / "config.json").string()));
  DS_ASSIGN(const exporting::Family family, family_for(options, config));
  DS_ASSIGN(const auto shards, read_shards(options.shards));
  DS_ASSIGN(const ExportPlan plan, exporting::plan_export(family, config, model.layout(), shards, options.ignored));
  if (!options.json.empty()) DS_TRY(write_text(options.json, exporting::to_json(plan)));
  return print_line("family " + plan.family + ": " + std::to_string(model.layout()->tensors().size()) + " tensors of " +
                    std::to_string(shards.size()) + " ranks by " + std::to_string(plan.copies.size()) + " copies, " +
                    std::to_string(plan.constants.size()) + " from the directory, " +
                    std::to_string(plan.ignored.size()) + " of the trainer's ignored");
}

}  // namespace

std::function<Status()> setup_export_plan(CLI::App& app) {
  auto options = std::make_shared<ExportPlanArgs>();  // shared with the callbacks, which CLI11 copies
  app.add_option("--hf", options->hf, "the model directory that the run began from")->required()->type_name("DIR");
  app.add_option("--shards", options->shards, "what each rank holds, one file a rank (export.md)")
      ->required()
      ->type_name("FILE");
  app.add_option("--family", options->families,
                 "a page of your own, before those that come along, or the name of one of these; may be repeated")
      ->type_name("FAMILY")
      ->allow_extra_args(false);
  app.add_option("--ignore", options->ignored,
                 "a tensor of the trainer that is no part of the model, * for any part of its name")
      ->type_name("NAME")
      ->allow_extra_args(false);
  app.add_option("--json", options->json, "where the plan is written")->type_name("FILE");
  return [options] { return run_export_plan(*options); };
}

}  // namespace deltasync::cli
