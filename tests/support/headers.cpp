// For a target that has precompiled headers and nothing else.
int main() {}
