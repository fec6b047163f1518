// Which of several forms a model directory has, as far as the shapes of its tensors tell.
#pragma once

#include <set>
#include <string>

namespace deltasync::exporting {

class Forms {
 public:
  using Names = std::set<std::string>;

  /// The shape of a tensor fits rows of these forms, and no row of the others.
  void note(const Names& fitting, const Names& others) {
    if (fitting.empty()) return;
    for (const std::string& form : others) {
      if (!fitting.contains(form)) away_.insert(form);
    }
    if (fitting.size() == 1 && !others.empty()) there_.insert(*fitting.begin());
  }

  /// The one of these that no tensor was without; of several, or if there is none, the one that a tensor was in and in
  /// no other. Null if that is not one alone.
  const std::string* only_of(const Names& forms) const {
    Names possible;
    for (const std::string& form : forms) {
      if (!away_.contains(form)) possible.insert(form);
    }
    if (possible.size() == 1) return &*forms.find(*possible.begin());
    const std::string* found = nullptr;
    for (const std::string& form : forms) {
      if (!there_.contains(form) || (!possible.empty() && !possible.contains(form))) continue;
      if (found != nullptr) return nullptr;
      found = &form;
    }
    return found;
  }

 private:
  Names there_;
  Names away_;
};

}  // namespace deltasync::exporting
