#include "export/plan.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include "export/adapter.hpp"
#include "export/boxes.hpp"
#include "export/element_map.hpp"
#include "export/forms.hpp"
#include "export/name_pattern.hpp"
#include "export/page_values.hpp"
#include "export/quantisation.hpp"
#include "export/trainer_tensors.hpp"

namespace deltasync::exporting {
namespace {

constexpr std::size_t kNamesShown = 8;  ///< of each side, in a message

class Planner {
 public:
  Planner(const Family& family, PageValues values, LayoutPtr layout, Quantisation quantisation,
          std::span<const std::string> ignored)
      : family_(family), values_(std::move(values)), ignored_(ignored.begin(), ignored.end()) {
    plan_.layout = std::move(layout);
    for (const QuantisedTensor& one : quantisation.tensors) scale_of_[one.scale] = one.tensor;
    activations_.insert(quantisation.activations.begin(), quantisation.activations.end());
    plan_.quantised = std::move(quantisation.tensors);
    plan_.family = family.name;
    for (const FamilyRow& row : family.rows) plan_.rows.push_back(row.label);
    ignored_.insert(ignored_.end(), family.ignored.begin(), family.ignored.end());
    slots_.resize(plan_.layout->tensors().size());
  }

  Result<ExportPlan> make(std::span<const std::vector<ShardPiece>> shards) {
    DS_ASSIGN(const auto tensors, collect_tensors(shards));
    for (const auto& [key, tensor] : tensors) DS_TRY(place(key, tensor));
    for (const Doubtful& doubtful : doubtful_) DS_TRY(settle(doubtful));
    DS_TRY(add_aliases());
    DS_TRY(check_targets());
    std::erase_if(plan_.quantised, [&](const QuantisedTensor& one) { return slots_[one.tensor].filled.empty(); });
    std::sort(plan_.copies.begin(), plan_.copies.end(), [](const ExportCopy& a, const ExportCopy& b) {
      return std::tie(a.tensor, a.target_offset) < std::tie(b.tensor, b.target_offset);
    });
    return std::move(plan_);
  }

 private:
  /// What is known of a HF tensor's places: the fixed axes of each map that leads to it.
  struct Slots {
    std::vector<std::vector<FixedAxis>> filled;

    std::uint64_t places() const {
      std::uint64_t count = 0;
      for (const auto& axes : filled) {
        count += std::accumulate(axes.begin(), axes.end(), std::uint64_t{1},
                                 [](std::uint64_t n, const FixedAxis& axis) { return n * axis.count; });
      }
      return count;
    }
    std::uint64_t places_there_are() const {
      std::uint64_t count = 1;
      if (!filled.empty()) {
        for (const FixedAxis& axis : filled.front()) count *= axis.extent;
      }
      return count;
    }
  };

  /// A tensor of the trainer under the name that rows know, and how names on disk that begin so begin instead.
  struct Renamed {
    std::string name;
    std::string hf;
    std::string hf_to;

    std::string on_disk(const std::string& of_row) const {
      return of_row.starts_with(hf) ? hf_to + of_row.substr(hf.size()) : of_row;
    }
  };

  struct Candidate {
    std::uint32_t row;  ///< that a tensor may go by
    Captures captures;
  };
  struct Doubtful {  ///< the shape makes what the directory has by rows of several forms
    Renamed name;
    std::string key;
    const TrainerTensor* tensor;
    std::vector<Candidate> candidates;
  };

  /// By the first rename that fits.
  Result<Renamed> renamed(const std::string& key) const {
    for (const FamilyRename& rename : family_.renames) {
      for (const std::string& pattern : rename.mcore) {
        std::string_view rest;
        DS_ASSIGN(const auto captures, match_prefix(pattern, key, rest));
        if (!captures) continue;
        Renamed out;
        for (const auto& [pattern_to, text] :
             {std::pair(&rename.to, &out.name), std::pair(&rename.hf, &out.hf), std::pair(&rename.hf_to, &out.hf_to)}) {
          auto expanded = expand_name(*pattern_to, values_.with(*captures));
          if (!expanded) return std::move(expanded).error().with_context(rename.label);
          *text = *std::move(expanded);
        }
        out.name += rest;
        return out;
      }
    }
    return Renamed{key, {}, {}};
  }

  /// Whether the directory has the tensors that the row makes, in the shapes that it makes.
  Result<bool> fits(const FamilyRow& row, const Captures& captures, const Renamed& name,
                    std::span<const std::uint64_t> shape) const {
    const Names names = values_.with(captures);
    DS_ASSIGN(const Parts parts, parse_parts(row.parts, shape.empty() ? 1 : shape.front(), names));
    for (const Parts::Part& part : parts.parts) {
      const auto target = target_of(row, part.name);
      if (target == row.targets.end()) continue;
      DS_ASSIGN(const std::string of_row, expand_name(target->hf, names));
      const auto index = plan_.layout->find(name.on_disk(of_row));
      if (!index) return false;
      DS_ASSIGN(const ElementMap map, map_part(parts, part, target->view, shape, names));
      if (map.target_shape != plan_.layout->tensors()[*index].spec.shape) return false;
    }
    return true;
  }

  static std::vector<RowTarget>::const_iterator target_of(const FamilyRow& row, const std::string& part) {
    return std::find_if(row.targets.begin(), row.targets.end(), [&](const RowTarget& t) { return t.part == part; });
  }

  Status place(const std::string& key, const TrainerTensor& tensor) {
    for (const std::string& pattern : ignored_) {
      DS_ASSIGN(const auto matched, match_name(pattern, key));
      if (!matched) continue;
      plan_.ignored.push_back(key);
      return {};
    }
    DS_ASSIGN(const Renamed name, renamed(key));
    DS_ASSIGN(bool placed, place_by_row(name.name, nullptr, name, key, tensor));
    if (const auto adapter = placed ? std::nullopt : adapter_of(name.name); adapter) {
      DS_ASSIGN(placed, place_by_row(adapter->base, &*adapter, name, key, tensor));
    }
    if (!placed) unused_.push_back(key);
    return {};
  }

  /// By the first row that matches `wanted`, and holds; false if none does. Of an adapter: by one that is for a weight
  /// of its own.
  Result<bool> place_by_row(const std::string& wanted, const AdapterName* adapter, const Renamed& name,
                            const std::string& key, const TrainerTensor& tensor) {
    DS_ASSIGN(std::vector<Candidate> candidates, candidates_for(wanted, adapter, tensor));
    if (!candidates.empty() && !form_of(candidates.front()).empty()) {
      DS_TRY(keep_fitting(candidates, name, key, tensor));
    }
    if (candidates.empty()) return false;
    if (candidates.size() > 1) {
      doubtful_.push_back({name, key, &tensor, std::move(candidates)});
      return true;
    }
    const auto& [row, captures] = candidates.front();
    DS_TRY((adapter == nullptr ? carry_out(row, captures, name, key, tensor)
                               : carry_out_adapter(row, captures, *adapter, name, key, tensor))
               .with_context(family_.rows[row].label + ": " + key));
    return true;
  }

  const std::string& form_of(const Candidate& candidate) const { return family_.rows[candidate.row].alternative; }

  /// The rows that match and hold, up to the first without a form.
  Result<std::vector<Candidate>> candidates_for(const std::string& wanted, const AdapterName* adapter,
                                                const TrainerTensor& tensor) const {
    std::vector<Candidate> out;
    for (std::uint32_t i = 0; i < family_.rows.size(); ++i) {
      const FamilyRow& row = family_.rows[i];
      if (adapter != nullptr && !is_for(row, *adapter)) continue;
      for (const std::string& pattern : row.mcore) {
        DS_ASSIGN(auto captures, match_name(pattern, wanted));
        if (!captures) continue;
        if (!tensor.first().global_shape.empty()) captures->emplace("D", tensor.first().global_shape.front());
        auto holds = values_.holds(row.when, *captures);
        if (!holds) return std::move(holds).error().with_context(row.label + ": when");
        if (*holds) out.push_back({i, *std::move(captures)});
        if (*holds) break;
      }
      if (!out.empty() && form_of(out.back()).empty()) break;
    }
    return out;
  }

  /// Leaves those that make what the directory has, one of each form; the row without one counts where no other does.
  Status keep_fitting(std::vector<Candidate>& candidates, const Renamed& name, const std::string& key,
                      const TrainerTensor& tensor) {
    std::vector<Candidate> fitting;
    std::set<std::string> forms;
    std::set<std::string> others;
    for (const Candidate& candidate : candidates) {
      const FamilyRow& row = family_.rows[candidate.row];
      auto suits = fits(row, candidate.captures, name, tensor.first().global_shape);
      if (!suits && !row.alternative.empty()) return std::move(suits).error().with_context(row.label + ": " + key);
      if (!suits || !*suits) {
        others.insert(row.alternative);
      } else if (forms.insert(row.alternative).second) {
        fitting.push_back(candidate);
      }
    }
    forms_.note(forms, others);
    if (fitting.empty() && form_of(candidates.back()).empty()) fitting.push_back(candidates.back());
    candidates = std::move(fitting);
    return {};
  }

  /// By the row of the form that other tensors tell.
  Status settle(const Doubtful& doubtful) {
    std::set<std::string> forms;
    std::vector<std::string> rows;
    for (const Candidate& candidate : doubtful.candidates) {
      const std::string& form = *forms.insert(form_of(candidate)).first;
      rows.push_back(family_.rows[candidate.row].label + (form.empty() ? "" : " (" + form + ")"));
    }
    const std::string* const form = forms_.only_of(forms);
    if (form == nullptr) {
      return Error(Errc::unsupported, doubtful.key + " is ambiguous" + listed("rows make the directory's shape", rows) +
                                          "; and no other tensor tells which alternative the directory is");
    }
    const auto found = std::find_if(doubtful.candidates.begin(), doubtful.candidates.end(),
                                    [&](const Candidate& candidate) { return form_of(candidate) == *form; });
    return carry_out(found->row, found->captures, doubtful.name, doubtful.key, *doubtful.tensor)
        .with_context(family_.rows[found->row].label + ": " + doubtful.key);
  }

  /// Whether it is one of a module's weight by itself: not of what is stacked in another one, nor of a norm.
  static bool is_for(const FamilyRow& row, const AdapterName& adapter) {
    return row.alternative.empty() && row.add == 0 &&
           std::all_of(row.targets.begin(), row.targets.end(),
                       [&](const RowTarget& target) { return adapter_on_disk(target.hf, adapter).has_value(); });
  }

  /// `whole`: goes to each of the row's targets (or to its part's) as it is. Else as the row says of the weight.
  Status carry_out_adapter(std::uint32_t number, const Captures& captures, const AdapterName& adapter,
                           const Renamed& name, const std::string& key, const TrainerTensor& tensor) {
    const FamilyRow& row = family_.rows[number];
    const std::vector<std::uint64_t>& shape = tensor.first().global_shape;
    const Names names = values_.with(captures);
    if (shape.empty()) return Error(Errc::layout_mismatch, "a scalar has no parts");
    DS_ASSIGN(const Parts parts, parse_parts(adapter.whole() ? "" : row.parts, shape.front(), names));
    std::set<std::string> seen;
    for (const RowTarget& target : row.targets) {
      if (!adapter.part.empty() && target.part != adapter.part) continue;
      DS_ASSIGN(const std::string of_row, expand_name(target.hf, names));
      const std::string hf = *adapter_on_disk(name.on_disk(of_row), adapter);
      if (!seen.insert(hf).second && adapter.whole()) continue;  // of several parts that are one tensor there
      const auto index = plan_.layout->find(hf);
      if (!index) {
        note_not_there(hf, key);
        continue;
      }
      for (const Parts::Part& part : parts.parts) {
        if (!adapter.whole() && part.name != target.part) continue;
        DS_ASSIGN(const ElementMap map, map_part(parts, part, adapter.whole() ? "" : target.view, shape, names));
        DS_TRY(fill(*index, map, number, tensor));
      }
    }
    if (seen.empty()) unused_.push_back(key);
    return {};
  }

  Status carry_out(std::uint32_t number, const Captures& captures, const Renamed& name, const std::string& key,
                   const TrainerTensor& tensor) {
    const FamilyRow& row = family_.rows[number];
    const std::vector<std::uint64_t>& shape = tensor.first().global_shape;
    const Names names = values_.with(captures);
    if (!row.parts.empty() && shape.empty()) return Error(Errc::layout_mismatch, "a scalar has no parts");
    DS_ASSIGN(const Parts parts, parse_parts(row.parts, shape.empty() ? 1 : shape.front(), names));
    std::vector<std::string> dropped;
    bool used = false;
    std::set<std::string> left;
    for (const RowTarget& target : row.targets) left.insert(target.part);
    for (const Parts::Part& part : parts.parts) {
      if (part.name == "_") continue;
      const auto target = target_of(row, part.name);
      if (target == row.targets.end()) {
        return Error(Errc::invalid_argument, "no hf." + part.name + ": a part that goes nowhere is called '_'");
      }
      left.erase(part.name);
      DS_ASSIGN(const std::string of_row, expand_name(target->hf, names));
      const std::string hf = name.on_disk(of_row);
      const auto index = plan_.layout->find(hf);
      if (!index) {
        if (!row.optional) note_not_there(hf, key);
        dropped.push_back(key + "[" + part.name + "]");
        continue;
      }
      used = true;
      DS_ASSIGN(const ElementMap map, map_part(parts, part, target->view, shape, names));
      DS_TRY(fill(*index, map, number, tensor));
    }
    if (!left.empty()) return Error(Errc::invalid_argument, "hf." + *left.begin() + " is none of its parts");
    if (!used) dropped = {key};
    plan_.ignored.insert(plan_.ignored.end(), dropped.begin(), dropped.end());
    return {};
  }

  void note_not_there(const std::string& hf, const std::string& key) {
    not_there_.push_back(hf);
    not_there_.back().append(" (of ").append(key).append(")");
  }

  Status fill(std::uint32_t index, const ElementMap& map, std::uint32_t row, const TrainerTensor& tensor) {
    const Tensor& target = plan_.layout->tensors()[index];
    if (map.target_shape != target.spec.shape) {
      return Error(Errc::layout_mismatch, "it makes " + shape_text(map.target_shape) + ", and " + target.spec.name +
                                              " has " + shape_text(target.spec.shape));
    }
    const Dtype from = tensor.first().dtype;
    const auto casts = [](Dtype dtype) { return dtype == Dtype::f32 || dtype == Dtype::bf16; };
    const bool changes = from != target.spec.dtype || family_.rows[row].add != 0;
    // Each that is F8_E4M3 has scales, which are made with it.
    if (changes && !(casts(from) && (casts(target.spec.dtype) || target.spec.dtype == Dtype::f8_e4m3))) {
      return Error(Errc::unsupported, "no cast from " + std::string(to_string(from)) + " to " +
                                          std::string(to_string(target.spec.dtype)) + " of " + target.spec.name);
    }
    if (dtype_packed(from) != 1) return Error(Errc::unsupported, "packed values of " + target.spec.name);
    if (const auto of = scale_of_.find(index); of != scale_of_.end()) {
      return Error(Errc::coverage, target.spec.name + " is written twice: it has the scales of " +
                                       plan_.layout->tensors()[of->second].spec.name);
    }
    DS_TRY(note_slot(index, map));
    for (const PieceAt& at : tensor.pieces) {
      for (ExportCopy& copy : copies_of(map, *at.piece)) {
        copy.tensor = index;
        copy.rank = at.rank;
        copy.piece = at.index;
        copy.row = row;
        copy.add = family_.rows[row].add;
        plan_.copies.push_back(std::move(copy));
      }
    }
    return {};
  }

  /// Maps into one tensor keep to other places of the same fixed axes, or they would overlap.
  Status note_slot(std::uint32_t index, const ElementMap& map) {
    Slots& slots = slots_[index];
    const std::string& name = plan_.layout->tensors()[index].spec.name;
    const auto same = [](const FixedAxis& a, const FixedAxis& b) {
      return a.stride == b.stride && a.extent == b.extent;
    };
    const auto meet = [](const FixedAxis& a, const FixedAxis& b) {
      return a.index < b.index + b.count && b.index < a.index + a.count;
    };
    for (const std::vector<FixedAxis>& other : slots.filled) {
      if (!std::equal(other.begin(), other.end(), map.fixed.begin(), map.fixed.end(), same)) {
        return Error(Errc::coverage, name + " is made of places that do not fit together");
      }
      if (std::equal(other.begin(), other.end(), map.fixed.begin(), meet)) {
        return Error(Errc::coverage, name + " is written twice");
      }
    }
    slots.filled.push_back(map.fixed);
    return {};
  }

  /// An alias may be one of an alias: until nothing more comes of them.
  Status add_aliases() {
    if (family_.aliases.empty()) return {};
    for (bool more = true; more;) {
      more = false;
      for (std::uint32_t i = 0; i < slots_.size(); ++i) {
        if (!slots_[i].filled.empty()) continue;
        DS_ASSIGN(const auto of, alias_of(plan_.layout->tensors()[i].spec.name));
        if (!of) continue;
        DS_TRY(copy_as(i, *of));
        more = true;
      }
    }
    return {};
  }

  /// The tensor that one has the bytes of, if that is written.
  Result<std::optional<std::uint32_t>> alias_of(const std::string& name) const {
    for (const FamilyAlias& alias : family_.aliases) {
      DS_ASSIGN(const auto captures, match_name(alias.hf, name));
      if (!captures) continue;
      DS_ASSIGN(const bool holds, values_.holds(alias.when, *captures));
      if (!holds) continue;
      DS_ASSIGN(const std::string of, expand_name(alias.of, values_.with(*captures)));
      const auto index = plan_.layout->find(of);
      if (index && !slots_[*index].filled.empty()) return index;
    }
    return std::optional<std::uint32_t>();
  }

  Status copy_as(std::uint32_t index, std::uint32_t of) {
    const Tensor& target = plan_.layout->tensors()[index];
    const Tensor& source = plan_.layout->tensors()[of];
    if (target.spec.shape != source.spec.shape || target.spec.dtype != source.spec.dtype) {
      return Error(Errc::layout_mismatch, target.spec.name + " is to have the bytes of " + source.spec.name +
                                              ", which has another shape or dtype");
    }
    slots_[index] = slots_[of];
    const std::size_t count = plan_.copies.size();
    for (std::size_t i = 0; i < count; ++i) {
      if (plan_.copies[i].tensor != of) continue;
      ExportCopy copy = plan_.copies[i];
      copy.tensor = index;
      plan_.copies.push_back(std::move(copy));
    }
    return {};
  }

  Result<bool> is_constant(const std::string& name) const {
    for (const FamilyConstant& constant : family_.constants) {
      DS_ASSIGN(const auto captures, match_name(constant.hf, name));
      if (!captures) continue;
      DS_ASSIGN(const bool holds, values_.holds(constant.when, *captures));
      if (holds) return true;
    }
    return false;
  }

  Status check_targets() {
    std::vector<std::string> unwritten;
    for (std::uint32_t i = 0; i < slots_.size(); ++i) {
      const Tensor& tensor = plan_.layout->tensors()[i];
      if (slots_[i].places() == slots_[i].places_there_are()) continue;
      if (!slots_[i].filled.empty()) {
        unwritten.push_back(tensor.spec.name + " (" + std::to_string(slots_[i].places()) + " of " +
                            std::to_string(slots_[i].places_there_are()) + " places)");
        continue;
      }
      const auto of = scale_of_.find(i);
      if (of != scale_of_.end() && !slots_[of->second].filled.empty()) continue;
      DS_ASSIGN(const bool constant, is_constant(tensor.spec.name));
      if (constant || activations_.contains(i)) {
        plan_.constants.push_back(i);
      } else {
        unwritten.push_back(tensor.spec.name);
      }
    }
    if (unwritten.empty() && unused_.empty() && not_there_.empty()) return {};
    std::string what = "family page " + family_.name + " does not fit";
    what += listed("tensors of the model directory that nothing is written to", unwritten);
    what += listed("tensors of the trainer that no row is for", unused_);
    what += listed("tensors that rows lead to, and the model directory does not have", not_there_);
    what += "; correct the page";
    if (!unwritten.empty()) what += ", in which [[constants]] are what keeps the directory's bytes";
    if (!unused_.empty() || !not_there_.empty()) what += ", or name what is no part of the model as ignored";
    return Error(Errc::coverage, what);
  }

  static std::string listed(const std::string& what, const std::vector<std::string>& names) {
    if (names.empty()) return "";
    std::string out = "; " + std::to_string(names.size()) + " " + what + ": ";
    for (std::size_t i = 0; i < std::min(names.size(), kNamesShown); ++i) out += (i == 0 ? "" : ", ") + names[i];
    return out + (names.size() > kNamesShown ? ", …" : "");
  }

  const Family& family_;
  const PageValues values_;
  std::vector<std::string> ignored_;
  std::map<std::uint32_t, std::uint32_t> scale_of_;  ///< tensors of scales, and what they are of
  std::set<std::uint32_t> activations_;              ///< scales that stay as they are
  std::vector<Slots> slots_;
  ExportPlan plan_;
  std::vector<std::string> unused_;
  std::vector<std::string> not_there_;
  std::vector<Doubtful> doubtful_;
  Forms forms_;
};

}  // namespace

Result<ExportPlan> plan_export(const Family& family, std::string_view config, LayoutPtr layout,
                               std::span<const std::vector<ShardPiece>> shards, std::span<const std::string> ignored) {
  DS_ASSIGN(nlohmann::json json, parse_config(config));
  DS_ASSIGN(Quantisation quantisation, quantisation_of(json, *layout));
  return Planner(family, PageValues(family, std::move(json)), std::move(layout), std::move(quantisation), ignored)
      .make(shards);
}

Result<std::vector<std::string>> architectures_of(std::string_view config) {
  DS_ASSIGN(const nlohmann::json json, parse_config(config));
  std::vector<std::string> out;
  const auto found = json.find("architectures");
  if (found == json.end() || !found->is_array()) return out;
  for (const nlohmann::json& name : *found) {
    if (name.is_string()) out.push_back(name.get<std::string>());
  }
  return out;
}

}  // namespace deltasync::exporting
