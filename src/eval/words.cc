#include "eval/words.h"

#include <algorithm>
#include <set>

#include "eval/random.h"

namespace longkv {

namespace {

std::vector<std::string> split(const char* text) {
  std::vector<std::string> words;
  std::string word;
  for (const char* c = text; *c != '\0'; ++c) {
    if (*c != ' ') {
      word += *c;
    } else if (!word.empty()) {
      words.push_back(std::move(word));
      word.clear();
    }
  }
  if (!word.empty()) words.push_back(word);
  return words;
}

}  // namespace

const std::vector<std::string>& eval_adjectives() {
  static const std::vector<std::string> words = split(
      "amber ancient bitter blank bold brave brief bright brisk broad calm careful clever cold coral crimson crisp "
      "curious "
      "damp dark deep distant dry dull eager early earnest empty even faint fair fancy fast fierce fine firm flat fond "
      "frail fresh gentle glad golden grand grave green grim hardy hasty heavy hollow honest humble icy idle inner "
      "ivory "
      "jolly keen kind large late lean light lively lonely loud loyal lucky mellow merry mild modest narrow neat noble "
      "odd "
      "old olive outer pale patient plain polite proud pure quaint quick quiet rapid rare raw ready rich ripe rough "
      "round "
      "royal rustic sage scarlet secret shady sharp shy silent silver simple sleepy slim slow small smooth sober soft "
      "solid "
      "sour spare steady steep stern still stout strange strict strong subtle sudden sunny sweet swift tall tame "
      "tender "
      "thick thin tidy tiny tough true upper vague vast velvet vivid warm weary wide wild windy wise witty young");
  return words;
}

const std::vector<std::string>& eval_nouns() {
  static const std::vector<std::string> words = split(
      "acorn anchor apron arch arrow badge basin beacon bell bench birch blade boulder bridge brook bucket cabin "
      "candle "
      "canvas castle cedar chapel cliff cloak clover comet compass copper cottage cradle crane creek crown delta "
      "desert "
      "dune eagle ember engine falcon feather ferry fiddle field flute forest fountain fox garden gate glacier grove "
      "hammer "
      "harbor hazel heron hill hinge island ivy jacket jasper kettle kestrel kite ladder lagoon lantern laurel ledge "
      "lemon "
      "linen lion lodge loom magnet maple marble market meadow mirror moss mill nest oak oasis orchard otter owl "
      "paddle "
      "palace parcel pebble pepper piano pier pigeon pillar plateau plum pocket pond poplar prairie quarry quill raven "
      "reef "
      "ribbon river robin saddle sail sapphire shelf shore sparrow spindle spring spruce stable stone stove summit "
      "swan "
      "table temple thistle thunder timber tower trail tulip tunnel turnip valley vessel village vine violin wagon "
      "walnut "
      "water whistle willow window winter wolf yarrow");
  return words;
}

const std::vector<std::string>& eval_people() {
  static const std::vector<std::string> words = split(
      "Agnes Albert Amelia Arthur Beatrice Benedict Bridget Cecil Clara Conrad Cora Daniel Dora Edgar Edith Edwin "
      "Eleanor "
      "Elias Emil Esther Felix Flora Frances Frederick Gilbert Grace Gustav Hannah Harold Helena Henry Hugo Ida Irene "
      "Isaac "
      "Isabel Jacob Josephine Judith Julian Laura Leonard Lucas Lydia Mabel Magnus Margaret Martin Matilda Maurice "
      "Miriam "
      "Nathan Nora Oliver Olga Oscar Pauline Philip Rachel Raymond Rosa Rupert Samuel Sibyl Silas Simon Sophia Stephen "
      "Sylvia Theodore Thomas Ursula Victor Viola Walter Winifred");
  return words;
}

const std::vector<std::string>& eval_families() {
  static const std::vector<std::string> words = split(
      "Abbot Archer Ashdown Barlow Bellamy Birch Blackwood Bramley Calder Carver Chandler Colby Cooper Crane Dalton "
      "Denham "
      "Draper Eastwood Ellery Fairfax Fenwick Fletcher Forester Garland Gibbs Granger Hadley Halloway Harding "
      "Hawthorne "
      "Holt Hyde Ingram Jarvis Keats Kirby Lambert Langley Lister Lockwood Marlow Mercer Milner Norwood Oakley Osborne "
      "Palmer Penrose Porter Quincy Radley Ramsay Redfern Rowe Sadler Sawyer Selby Shelton Slater Stanton Tanner "
      "Thorne "
      "Turner Underhill Vance Wainwright Waller Webster Whitlock Wycliffe Yardley");
  return words;
}

const std::vector<std::string>& eval_places() {
  static const std::vector<std::string> words = split(
      "Alderton Ambleford Arkwell Ashcombe Barrowby Beckwith Birkdale Blakeney Bramford Brightwater Caldbeck "
      "Carrowmore "
      "Chilham Coldharbour Cragside Dunmere Eastleigh Elmstead Fallowfield Farnmoor Fenbridge Foxholme Galloway "
      "Glenrock "
      "Goldcliff Grayshott Harrowgate Hartsmere Hawkridge Hazelbury Highmoor Holmfirth Inverlee Kelmscott Kingsferry "
      "Larkhill Linford Longhurst Lowmarsh Maplewick Marshfield Millbrook Netherby Newhaven Northwold Oakhanger "
      "Oldcastle "
      "Otterbourne Pennyhill Ravenglass Redmarley Riverhead Rookhope Saltmarsh Sandringham Shelfield Silverdale "
      "Southmere "
      "Stillwater Stonebridge Summercourt Thornbury Tidewell Underwood Upwell Wallingford Westerham Whitchurch "
      "Windermere "
      "Woodhaven Yarrowby");
  return words;
}

const std::vector<std::string>& eval_goods() {
  static const std::vector<std::string> words = split(
      "almonds anvils apples axes barrels baskets bells blankets bottles bowls brooms brushes buckets buttons candles "
      "carpets "
      "chairs cheeses cherries chests chisels clocks cloaks coats combs crates cups curtains daggers drums eggs "
      "fiddles flutes "
      "forks gloves goblets grapes hammers harps hats helmets hinges hoes horseshoes jars kettles keys knives ladders "
      "lamps "
      "lanterns lemons locks looms maps mirrors nails needles nets oars onions paintings pans pears pencils pipes "
      "pistols "
      "pitchers plates ploughs plums pots pulleys quills rakes razors ribbons ropes rugs saddles sails saws scarves "
      "scissors "
      "shovels sickles skillets spades spoons stools swords tables teapots tents tiles tongs trumpets turnips "
      "umbrellas vases "
      "violins walnuts wheels whistles");
  return words;
}

std::vector<std::string> draw_words(EvalRandom& random, size_t n) {
  const auto &adjectives = eval_adjectives(), &nouns = eval_nouns();
  const size_t plain = adjectives.size() + nouns.size();
  std::vector<std::string> words;
  for (const int64_t i : random.distinct(int64_t(plain), int64_t(std::min(n, plain)))) {
    const auto k = size_t(i);
    words.push_back(k < adjectives.size() ? adjectives[k] : nouns[k - adjectives.size()]);
  }
  std::set<std::string> known(words.begin(), words.end());
  while (words.size() < std::min(n, drawable_words())) {
    std::string compound = random.pick(adjectives) + random.pick(nouns);
    if (known.insert(compound).second) words.push_back(std::move(compound));
  }
  return words;
}

// Nearly all pairs: the last ones would be drawn too seldom.
size_t drawable_words() {
  return eval_adjectives().size() + eval_nouns().size() + eval_adjectives().size() * eval_nouns().size() / 2;
}

}  // namespace longkv
