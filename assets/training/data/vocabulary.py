"""The words that stories and lists are made of. Plain lists, one subject each."""

ANIMALS = (
    "ant badger bat bear beaver bee beetle bird bull butterfly camel cat caterpillar chicken cow crab cricket crow deer "
    "dog dolphin donkey dragon dragonfly duck eagle eel elephant falcon ferret firefly fish fox frog gecko giraffe goat "
    "goose grasshopper hamster hare hawk hedgehog hen heron horse kangaroo kitten ladybird lamb lion lizard llama "
    "lobster lynx mole monkey moose moth mouse newt octopus otter owl ox panda parrot peacock pelican penguin pig pigeon "
    "pony puppy rabbit raccoon rat raven robin rooster salmon seal shark sheep skunk snail snake sparrow spider "
    "squirrel stork swallow swan tiger toad tortoise trout turkey turtle walrus weasel whale wolf woodpecker worm yak "
    "zebra dinosaur mermaid monster unicorn"
).split()

PEOPLE = (
    "actor artist baker barber blacksmith builder butcher captain carpenter clown cook dancer dentist doctor driver "
    "explorer farmer fisherman gardener ghost giant guard hunter inventor judge king knight magician mayor miller miner "
    "monk nurse painter pilot pirate plumber poet potter prince princess queen robot sailor scientist scout shepherd "
    "singer soldier tailor teacher thief troll wizard witch writer alien astronaut boy cowboy fairy girl"
).split()

OBJECTS = (
    "acorn anchor apple arrow axe bag ball balloon banjo barrel basket bell bench bicycle blanket boat book boot bottle "
    "bowl box bracelet bridge broom brush bucket button cake candle cannon car card carpet carrot cart chain chair chest "
    "clock cloud coat coin comb compass cookie crown cup cushion desk diamond diary doll door drum egg engine fan feather "
    "fence fiddle flag flower flute fork fountain garden gate glove guitar hammer harp hat helmet hook horn hourglass "
    "jacket jar jewel kettle key kite knife ladder lamp lantern leaf letter lighthouse lock loom map marble mask medal "
    "melon mirror mitten mountain mug nail necklace needle nest net notebook nut oar onion oven paddle painting pan parcel "
    "pear pearl pebble pen pencil photo piano pie pillow pipe plate plough pot potato puddle pumpkin puppet purse puzzle "
    "radio raft rainbow ribbon ring river rocket rope rose rug saddle sail sandwich saw scarf seed shell shield "
    "ship shoe shovel sled snowman sock spoon star statue stone stool storm suitcase sword table tent ticket tower "
    "toy train tree trumpet tunnel umbrella vase violin wagon wall watch wheel whistle windmill window"
).split()

GIRLS = (
    "Ada Agnes Alice Alma Amy Anna Aria Beth Bella Cara Celia Chloe Clara Daisy Dora Edith Elena Ella Elsa Emma Erin Eva "
    "Faye Fiona Flora Freya Gemma Gina Grace Greta Hana Hazel Heidi Helen Holly Ida Ines Iris Isla Ivy Jane Jasmine Joan "
    "Josie Julia June Karen Kate Kira Lara Laura Lena Lily Lola Lucy Luna Mabel Maria Mary Maya Mia Mina Molly Nadia Nell "
    "Nina Nora Olive Olga Paula Pearl Petra Polly Rita Rosa Rose Ruby Ruth Sadie Sally Sara Selma Sofia Stella Susan Tara "
    "Tess Tina Una Vera Viola Wanda Wendy Willa Yara Zara Zoe"
).split()

BOYS = (
    "Aaron Abel Adam Alan Albert Alex Andy Arthur Ben Bill Boris Bruno Carl Caleb Clive Colin Dan David Dean Dennis Dylan "
    "Eddie Eli Eric Ethan Evan Felix Finn Frank Fred Gary George Gus Hans Harry Henry Hugo Ian Igor Isaac Ivan Jack Jacob "
    "Jake James Jim Joe John Jonas Josh Kai Karl Keith Ken Kurt Larry Leo Leon Levi Liam Louis Luke Marco Mark Martin Max "
    "Milo Nathan Ned Neil Nick Noah Oliver Omar Oscar Otto Owen Pablo Paul Pedro Pete Ralph Ray Rob Roy Sam Scott Simon "
    "Stan Ted Theo Tim Toby Tom Tony Victor Walter Will Zack"
).split()

PLACES = (
    "attic bakery barn beach bridge canyon castle cave cellar cliff coast cottage courtyard desert dock farm field forest "
    "garage glacier harbour hill hotel island jungle kitchen lagoon lake library lighthouse market marsh meadow mill mine "
    "moor museum oasis orchard palace park path pier pond port prairie quarry ravine reef river road school shore "
    "square stable station stream swamp temple theatre tower town tunnel valley village vineyard waterfall well windmill "
    "wood workshop zoo"
).split()

FOODS = (
    "apples berries biscuits bread broth butter cake carrots cheese cherries chestnuts chocolate corn cream figs fudge "
    "grapes honey jam lemonade milk mushrooms noodles nuts oranges pancakes peaches pears pie plums porridge pudding "
    "raisins rice salad sandwiches soup stew tea toast tomatoes waffles walnuts"
).split()

LOOKS = (
    "ancient black blue brave bright brown busy careful cheerful clever clumsy cold curious dark dusty "
    "elegant enormous famous fast forgetful friendly funny gentle golden graceful green grey grumpy happy heavy "
    "honest hungry kind large lazy little lively lonely loud lucky merry muddy noisy odd old patient playful "
    "polite proud purple quick quiet red round shiny shy silent silver sleepy slender slow small "
    "smooth soft spotted stern stout strange striped strong stubborn tall tame tidy tiny tired ugly warm wet white "
    "wicked wild wise yellow young"
).split()

# What a thing of wood, cloth or metal can be: no moods.
OBJECT_LOOKS = (
    "ancient big black blue bright broken brown crooked dusty elegant enormous faded famous fine golden green grey heavy "
    "huge large little lost lovely magic new odd old orange painted pale pink plain precious pretty purple rare red round "
    "rusty secret shiny silver simple small smooth special strange striped tiny ugly white wonderful yellow"
).split()

FEELINGS = (
    "afraid amazed angry ashamed bored brave calm cheerful confused curious delighted eager excited glad grateful happy "
    "hopeful jealous lonely nervous pleased proud puzzled relieved sad scared shy sorry surprised thankful tired upset "
    "worried"
).split()

# Short common nouns for lists: sorting and counting.
LIST_WORDS = (
    "ant apple axe bag ball bat bear bee bell bird boat book box bread bus cake cap car card cat chair clock coat coin cow "
    "crab crow cup deer desk dog doll door drum duck ear egg eye fan farm fish flag fly fork fox frog game gate glass goat "
    "gold hand harp hat hen hill horse house ice ink iron island jam jar jug juice key king kite knife lake lamp leaf lion "
    "lock map mask milk moon mouse mug nail neck nest net night nose nut oak oar oil onion owl pan park pear pen pig pipe "
    "plum pond pot queen quilt rain rat ring road rock rope rose sail salt sand sea seed ship shoe snow soap sock star "
    "stone sun swan table tent toad tower train tree van vase wall wasp watch well whale wheel wind wolf wood yak yard zebra"
).split()

STORY_NOUNS = ANIMALS + PEOPLE + OBJECTS + PLACES


def with_article(noun: str) -> str:
    """`fox` -> `a fox`, `old fox` -> `an old fox`."""
    return ("an " if noun[0] in "aeiou" and not noun.startswith(("uni", "one", "use")) else "a ") + noun
