// Reads a long document and asks about it. What has been read is saved as it goes, so that a program that was stopped goes
// on where it was, and one that has read it all answers at once.
//
//   c++ -std=c++17 -o document document.cpp $(pkg-config --cflags --libs dsv4)
//   ./document MODEL TEXTFILE SESSIONFILE QUESTION

#include <dsv4.hpp>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

namespace {

constexpr std::size_t portion = 2048; // tokens between two saves
volatile std::sig_atomic_t stopped = 0;

std::string read_file(const char *path)
{
    std::ifstream file(path, std::ios::binary);
    file.exceptions(std::ios::badbit | std::ios::failbit);
    return {std::istreambuf_iterator<char>(file), {}};
}

// The session in the file, or a new one if there is none.
dsv4::Session open_session(const dsv4::Engine &engine, const std::string &path)
{
    try {
        return dsv4::Session::restore(engine, path);
    } catch (const dsv4::Error &error) {
        if (error.status() != dsv4::Status::not_found) throw;
        return dsv4::Session::create(engine);
    }
}

// Whether the session has the whole document now.
bool read_document(dsv4::Session &session, dsv4::Span<const dsv4::Token> document, const std::string &path)
{
    // all of it, if it is this document's session; less, if the document was changed
    std::size_t done = session.keep_common(document);
    std::cerr << done << " of " << document.size() << " tokens are in " << path << '\n';
    while (done < document.size()) {
        const std::size_t part = std::min(portion, document.size() - done);
        session.feed({document.data() + done, part});
        done += part;
        session.save(path, done == document.size() || stopped != 0);
        std::cerr << '\r' << done << " of " << document.size() << " tokens";
        if (stopped != 0) return false;
    }
    std::cerr << '\n';
    return true;
}

} // namespace

int main(int argc, char **argv)
{
    if (argc != 5) {
        std::cerr << "usage: document MODEL TEXTFILE SESSIONFILE QUESTION\n";
        return 2;
    }
    std::signal(SIGINT, [](int) { stopped = 1; });
    try {
        const dsv4::Model model = dsv4::Model::open(argv[1]);
        const dsv4::Engine engine = dsv4::Engine::create(model);
        dsv4::Session session = open_session(engine, argv[3]);
        std::vector<dsv4::Token> document = model.encode(read_file(argv[2]));
        document.insert(document.begin(), model.info().bos_token_id);
        if (!read_document(session, document, argv[3])) {
            std::cerr << "\nstopped; run it again to go on\n";
            return 130;
        }
        session.feed(model.encode(argv[4]));
        dsv4::Sampler sampler = dsv4::Sampler::create();
        dsv4::GenerationOptions options;
        options.max_tokens = 60;
        std::cout << argv[4];
        for (const dsv4::Piece &piece : session.generate(sampler, options)) std::cout << piece.text << std::flush;
        std::cout << '\n';
    } catch (const std::exception &error) {
        std::cerr << error.what() << '\n';
        return 1;
    }
}
