# Writes OUT: C++ that has the text of each of PAGES under the name of its file.
set(entries)
foreach(page IN LISTS PAGES)
  get_filename_component(name ${page} NAME_WE)
  file(READ ${page} text)
  string(APPEND entries "    {\"${name}\", R\"page(${text})page\"},\n")
endforeach()
file(WRITE ${OUT} "// Made of src/export/families/.
#include \"export/family.hpp\"

namespace deltasync::exporting {
namespace {

constexpr std::pair<std::string_view, std::string_view> kPages[] = {
${entries}};

}  // namespace

std::span<const std::pair<std::string_view, std::string_view>> builtin_families() { return kPages; }

}  // namespace deltasync::exporting
")
