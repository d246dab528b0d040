"""The sentences that stories are built of: beats (lists of alternatives) and plots (sequences of beats).

Fields in braces are filled by `stories.Scene`: {N} the hero, {he} {him} {his} {He} the hero's pronouns, {M} a
friend, {t} the thing asked for, {a_t} with article, {a_lt} with article and adjective, {p} {in_p} the place, {q}
{in_q} another place, {o} {a_lo} an object, {x} {a_lx} an animal, {w} {a_lw} a person, {when} a time, and further
moods and manners. A field ending in 2 is a second, independent choice.
"""

# A beat whose first entry is MAYBE is told in two stories of three.
MAYBE = "?"

MEET_CREATURE = (
    "{When}, {N} went to the {p} with {a_lo} and met {a_lt}.",
    "There was once {a_lt} that lived {in_p}, not far from the house of {N}.",
    "{Name_intro} {When}, {he} heard a {sound} {in_p}, and there sat {a_lt}.",
    "Long ago, {in_p}, {a_lt} and a child called {N} were neighbours.",
    "Everybody {in_q} knew {N}, but nobody knew the {t} that hid {in_p}.",
    "Nobody {in_p} was as {look} as the {t}, and nobody was as {feel} as {N}.",
    "{When}, {a_lt} {moved} into the {p}, where {N} was eating {food}.",
    "{A_t} with {a_lo} under its arm came to the {p} {when}.",
    "{N} had {num} friends, and the best of them was {a_lt} from the {p}.",
    "\"Look, {a_t}!\" cried {N} {when}, and pointed at the {p}.",
)
FIND_OBJECT = (
    "{When}, {N} found {a_lt} {in_p}.",
    "There was once {a_lt} that nobody wanted, until {N} saw it {in_p}.",
    "{Name_intro} {When}, {he} was given {a_lt} by {a_lw}.",
    "In a corner of the {p}, under {a_lo}, lay {a_lt}.",
    "{N} bought {a_lt} from {a_lw} {in_p} for {num} coins.",
    "The {w} of the {q} had {a_lt}, and {N} dreamed of it every night.",
    "{When}, {a_lx} dropped {a_lt} at the feet of {N}.",
    "Of all the things {in_p}, {N} loved {a_lt} the most.",
    "A parcel came to the {p} {when}, and in it was {a_lt} for {N}.",
    "\"Whose {t} is this?\" asked {N} {when}, somewhere between the {p} and the {q}.",
)
SEE_SIGHT = (
    "{When}, {N} and {M} saw {a_lt} {in_p}.",
    "There was once {a_lt} {in_p}, and {N} looked at it every day.",
    "{Name_intro} From {his} bed {he} could see {a_lt}.",
    "The people of the {p} were proud of their {t}, and {N} was the proudest.",
    "On the way to the {p} there is {a_lt}, and {when} {N} stopped beside it.",
    "{N} had drawn {a_lt} so often that {his} pencil was as short as a {x}'s nose.",
    "Beyond the {p}, where the {q} begins, {N} came upon {a_lt} {when}.",
    "Old people say that the {t} {in_p} was made by {a_lw}.",
)
WEATHER = (
    MAYBE,
    "The wind blew from the {q}, and it smelled of {food}.",
    "It was so {weather} that even the {x} stayed at home.",
    "Rain drummed on the roof like {num} {look} feet on a drum.",
    "The sun hung over the {q} like {a_lo}.",
    "Snow had covered the {q}, and every step made a {sound}.",
    "A thin mist lay on the {q}, as white as milk.",
    "Above the {q} the clouds were shaped like {a_lx} and {a_lo}.",
    "The air was {weather}, and somewhere {a_x} called.",
)
TALK_CREATURE = (
    "\"I am {low},\" said the {t}, \"because I have never seen the {q}.\"",
    "\"Would you like some {food}?\" asked {N}, and the {t} nodded {manner}.",
    "\"My name is {M},\" said the {t}, \"and I am looking for {a_lo}.\"",
    "\"You are {look},\" said {N}. The {t} only laughed.",
    "The {t} told {N} about the {q}, where it had once met {a_lw}.",
    "\"Can you keep a secret, {N}?\" whispered the {t}. {N} promised it {manner}.",
    "\"Nobody has time for me,\" sighed the {t}. \"I do,\" said {N}.",
    "{N} asked {num} questions, and the {t} answered every one {manner}.",
    "\"Do not be {low},\" said {N} {manner}, and gave the {t} {a_lo}.",
)
HELPER = (
    "Then {a_lx} came by and told them to ask the {w}.",
    "They asked {a_lw}, who was busy with {a_lo} but listened {manner}.",
    "{M} had an idea and ran home to get {a_lo}.",
    "{A_lw} {in_q} gave them {food} and good advice.",
    "\"Try the {q},\" said {a_lx}, and flicked its ears.",
    "Luckily {M}, who was {look2} and never {low}, came along with {a_lo}.",
    "A letter from {M} told them what the {w} had done long ago.",
)
SEARCH = (
    "They looked behind the {o}, under the {o2} and even in the soup of the {w}.",
    "First {N} searched the {q}, but there was only {a_lx} asleep on {a_lo}.",
    "{He} {moved} from the {q} to the {p2} and asked every {x}.",
    "For {num} days {N} looked {manner}, and all {he} found was {a_lo}.",
    "The tracks led past the {q} and ended at {a_lo}.",
    "{M} took the left path and {N} the right one, and both called {manner}.",
    "They turned over every stone {in_q} and found {num} coins, but nothing else.",
)
NIGHT = (
    MAYBE,
    "When night fell, {N} could not sleep and counted the stars over the {q}.",
    "That night {N} dreamed of {a_lx} with {a_lo}.",
    "By moonlight the {q} looked {fine}, and {N} felt {feel}.",
    "At midnight a {sound} came from the {q}, and the {x} woke up.",
    "They made a small fire and ate {food} with {food2}.",
)
END_CREATURE = (
    "Since then the {t} and {N} have shared their {food} every {day}.",
    "{N} went home {manner}, and the {t} waved until it was dark {in_p}.",
    "Today the {t} lives {in_q} with {a_lx}, and {N} visits it in {month}.",
    "And if you walk by the {p} in {month}, you may hear {N} and the {t} laughing.",
    "From then on, whenever {N} was {low}, the {t} brought {a_lo}.",
    "The {w} wrote it all down in a book, and the {t} kept it under {a_lo}.",
    "\"That was the best {day} of my life,\" said the {t}, and {N} thought so too.",
    "So the {t} learned to be {look}, and {N} learned to listen.",
    "They danced {in_p} until {M} called them to supper: {food} and {food2}.",
)
END_OBJECT = (
    "The {t} still stands by the bed of {N}, next to {a_lo}.",
    "{N} gave the {t} to {M}, who needed it more, and felt {glad} and light.",
    "Since then every child {in_p} wants {a_t} like that.",
    "Now the {t} hangs {in_q}, and on it is written: \"Found by {N} in {month}.\"",
    "When {N} is old, {he} will tell {his} grandchildren about the {t} and the {x}.",
    "And what became of the {t}? It was {fine} again, and it stayed that way.",
    "{He} put the {t} into {his} pocket and {moved} home to {food} and {food2}.",
    "That evening the {w} and {M} clapped, and {N} held the {t} up {manner}.",
    "Every {day} {N} polishes the {t} and thinks of the {w} {in_q}.",
)
END_SIGHT = (
    "Every {day} since then, {N} and {M} have met at the {t}.",
    "The {t} is still there, and {a_lx} sleeps beside it.",
    "{N} painted the {t} in {fine} colours and hung the picture {in_q}.",
    "People now call it the {t} of {N}, and the {w} sells {food} there.",
    "\"Good night, {t},\" said {N}, and it was as if something answered {manner}.",
    "In {month}, when it is {weather}, you can see {N} there with {a_lo}.",
    "That is why nobody {in_p} is ever {low} when they look at the {t}.",
)

CREATURE_PLOTS = {
    "friends": (
        MEET_CREATURE,
        WEATHER,
        (
            "The {t} was {low}, since the others {in_p} never let it play.",
            "The {t} wanted a friend, but it was too {low} to ask.",
            "{N} was new {in_p} and as {low} as the {t}.",
            "All the other animals laughed at the {t}, because it carried {a_lo} everywhere.",
            "For {num} days they only looked at each other from far away.",
        ),
        TALK_CREATURE,
        (
            "Together they built {a_lo} out of sticks and {food}.",
            "They raced to the {q}, and nobody minded who won.",
            "{N} taught the {t} a song about {a_lx}, and soon they both sang it {manner}.",
            "They played hide and seek {in_q}, until the {x} begged them to be quiet.",
            "They shared {food}, and the {t} told jokes about {a_lw}.",
        ),
        END_CREATURE,
    ),
    "lost home": (
        MEET_CREATURE,
        (
            "The {t} had lost its way and did not know how to get back to the {q}.",
            "\"I cannot find my home,\" cried the {t}. \"It is {in_q}, beside {a_lo}.\"",
            "A storm had carried the {t} far away from its family {in_q}.",
            "The {t} had followed {a_lx} too far and was {low} now.",
        ),
        WEATHER,
        SEARCH,
        HELPER,
        (
            "At last the {t} smelled {food} and knew the way again.",
            "Behind the last bend stood {a_lo}, and the {t} jumped for joy.",
            "Then {N} saw a light {in_q}, and the mother of the {t} came out {manner}.",
            "The map of the {w} was upside down; once {N} turned it, the way was easy.",
        ),
        END_CREATURE,
    ),
    "storm": (
        MEET_CREATURE,
        (
            "All at once the sky over the {q} turned black, and thunder rolled.",
            "Then the river rose and the water came up to the {o}.",
            "Suddenly there was a {sound}, and a tree fell across the path.",
            "Smoke was coming from the {q}, and the {x} ran {manner} in all directions.",
        ),
        (
            "The {t} was stuck under {a_lo} and could not move.",
            "\"{M} is still out there!\" shouted {N}.",
            "The {w} could not swim, and everyone was {low}.",
            "{N} slipped and held on to {a_lo} with one hand.",
        ),
        (
            "The {t} took a deep breath and pulled {manner} at the rope.",
            "Without a word the {t} {moved} into the {q} and came back with {M}.",
            "{N} tied {a_lo} to {his} belt and crawled to the {t}.",
            "The {t} and {N} pushed with all their strength, and {num} {x2}s helped them.",
            "\"Hold my hand,\" called {N}, and the {t} did.",
        ),
        HELPER,
        (
            "Afterwards the whole {p} smelled of wet leaves, and everyone drank hot milk.",
            "When it was over, the {w} made {food} for all of them.",
            "An hour later the sun shone on the {q} as if nothing had happened.",
            "The {t} was wet and {low}, but nobody was hurt.",
        ),
        END_CREATURE,
    ),
    "contest": (
        MEET_CREATURE,
        (
            "In {month} there was a great race from the {p} to the {q}.",
            "The {w} promised {a_lo} to whoever cooked the best {food}.",
            "Every year the people {in_q} held a singing contest, and the {t} wanted to take part.",
            "\"Who can carry {a_lo} to the {q} without stopping?\" asked the {w}.",
        ),
        (
            "\"You are far too {look},\" laughed {a_lx}.",
            "The {t} practised {manner} for {num} weeks, and {N} counted the minutes.",
            "{N} believed in the {t}, though nobody else did.",
            "On the first try the {t} fell into {a_lo}, and everyone laughed.",
        ),
        WEATHER,
        (
            "Halfway, the {x} stopped to eat {food}, and the {t} went by.",
            "When {M} fell, the {t} turned round and helped, although it cost the prize.",
            "The {t} closed its eyes, thought of {N} and did it {manner}.",
            "Nobody had expected it, but at the end the {t} was only a nose behind the {x}.",
        ),
        (
            "The {w} gave the prize to the {t}, and {N} threw {his} hat in the air.",
            "The {t} did not win, but the {w} gave it {a_lo} for a kind heart.",
            "Both winners shared the {food}, and {N} got the biggest piece.",
            "\"Next year I will try again,\" said the {t}, and it was not {low} at all.",
        ),
        END_CREATURE,
    ),
    "noise": (
        MEET_CREATURE,
        (
            "Every night there was a {sound} {in_q}, and nobody knew why.",
            "{When2}, something in the {q} began to hum.",
            "The {food} of the {w} vanished night after night.",
            "Someone had left strange footprints between the {p} and the {q}.",
        ),
        NIGHT,
        (
            "The {t} said it was {a_x}, {N} thought it was a ghost.",
            "\"We must find out,\" said {N} {manner}, although {he} was {low}.",
            "The {t} put on {a_lo} and {moved} ahead.",
            "They hid behind {a_lo} and waited {manner}.",
        ),
        (
            "It was only {a_lx} that played with {a_lo}!",
            "There sat {M}, who could not sleep and was mending {a_lo}.",
            "The wind had been blowing through {a_lo} all the time.",
            "It was {a_lw}, who was walking about half asleep and carried {food}.",
            "Out came {num} baby {x2}s, one after the other.",
        ),
        TALK_CREATURE,
        END_CREATURE,
    ),
    "greed": (
        MEET_CREATURE,
        (
            "The {t} had more {food} than it could eat, but it never shared.",
            "The {t} boasted that it was more {look} than anyone {in_q}.",
            "The {t} played a trick on {N} and hid {his} {o}.",
            "Whenever {N} had {food}, the {t} took half of it.",
        ),
        (
            "{When2}, the {t} fell into a hole behind the {q}.",
            "Then winter came, and the cupboard of the {t} was empty.",
            "But {when2} the {t} was ill, and nobody came to see it.",
            "\"One day you will need us,\" said {a_lx}, and so it was.",
        ),
        WEATHER,
        (
            "It was {N} who brought soup, and {a_lo} as well.",
            "{N} could have laughed, but {he} helped the {t} {manner}.",
            "\"I am sorry,\" said the {t}, and its ears turned red.",
            "The {w} and {M} came too, although the {t} had been rude to them.",
        ),
        (
            "The {t} thought about it for {num} days, and then it gave a feast.",
            "From that hour the {t} was the first to share its {food}.",
            "The {t} carried everything back, even the {o2} of the {w}.",
        ),
        END_CREATURE,
    ),
    "skill": (
        MEET_CREATURE,
        (
            "The {t} could do many things, but it could not swim.",
            "More than anything the {t} wanted to play the {music}.",
            "{N} wanted to learn how to whistle, and who could teach {him} if not the {t}?",
            "The {t} had never learned to read and was {low} about it.",
            "\"Teach me to fly a kite,\" said the {t} to {N}.",
        ),
        (
            "The first lesson ended with a {sound} and {num} bruises.",
            "It was harder than carrying {a_lo} up a hill.",
            "{A_lx} watched them and giggled, but they went on {manner}.",
            "\"Slowly,\" said {N}, \"and never with {food} in your mouth.\"",
        ),
        WEATHER,
        HELPER,
        (
            "On the next {day} it suddenly worked, and the {t} shouted for joy.",
            "After {num} weeks even the {w} was amazed.",
            "\"I can do it,\" cried the {t}, so {manner} that {a_lx} fell off {a_lo}.",
        ),
        END_CREATURE,
    ),
    "journey": (
        MEET_CREATURE,
        (
            "\"Behind the {q} there is a land where the trees are full of {food},\" said the {t}.",
            "The {w} was ill, and only a flower from the {q} could help.",
            "The {t} had a map of the {q}, with a red cross in the middle.",
            "They packed {food}, {a_lo} and a warm blanket and set out.",
        ),
        (
            "On the first day they crossed the {p2} on {a_lo}.",
            "On the way they met {a_lw} who spoke only in riddles.",
            "{A_lx} would not let them pass until they gave it {food}.",
            "They walked {manner}, and the {t} sang a song with {num} verses.",
        ),
        NIGHT,
        (
            "On the third day they reached the {q}, which was {fine} and still.",
            "At the end of the road stood {a_lo}, and beside it lay what they wanted.",
            "The {q} was smaller than they had thought, but the view was wonderful.",
            "There was no treasure, only {a_lx}; but the {t} had seen the world.",
        ),
        END_CREATURE,
    ),
}

OBJECT_PLOTS = {
    "lost": (
        FIND_OBJECT,
        (
            "But {when2} the {t} was gone.",
            "Then {M} borrowed the {t} and forgot where it was.",
            "One {day} {a_lx} grabbed the {t} and {moved} away.",
            "{N} left the {t} {in_q}, and when {he} came back, there was only {a_lo}.",
        ),
        SEARCH,
        WEATHER,
        HELPER,
        (
            "And there it was: the {t}, in the nest of {a_lx}.",
            "At last {N} heard a {sound}, and there lay the {t} under {a_lo}.",
            "The {w} had found the {t} and kept it safe {in_q}.",
            "{M} was ashamed and brought back the {t} with a bag of {food}.",
        ),
        END_OBJECT,
    ),
    "magic": (
        FIND_OBJECT,
        (
            "When {N} touched the {t}, there was a {sound}, and it began to speak.",
            "Whoever held the {t} could understand what every {x} said.",
            "\"I grant one wish,\" said the {t} {manner}.",
            "At full moon the {t} glowed, and {food} fell from the ceiling.",
        ),
        (
            "First {N} wished for {food}, and soon the whole {p} was full of it.",
            "{M} wanted to try as well, and turned the {w} into {a_lx}.",
            "{N} asked for {a_lo}, but what came was {a_lx} with {a_fine} hat.",
            "Soon everybody {in_q} wanted to have the {t}, and they began to quarrel.",
        ),
        (
            "\"Magic is hard work,\" said {a_lw}, \"and somebody must tidy up.\"",
            "{N} was {low} and took the {t} back to the {q}.",
            "In the end {N} wished only that everything was as before.",
            "So {N} asked the {t} what it wanted itself, as nobody {in_q} had ever done.",
        ),
        (
            "The {t} sparkled once more and was quiet.",
            "\"Thank you,\" said the {t}, and from then on it was just {a_t}.",
            "The {x} could still talk, though only on every second {day}.",
        ),
        END_OBJECT,
    ),
    "broken": (
        FIND_OBJECT,
        (
            "One {day} the {t} fell down with a {sound} and broke.",
            "The {t} was dirty and bent, and the {w} wanted to throw it away.",
            "\"It does not work any more,\" said {M} {manner}.",
            "A piece of the {t} was missing, and without it the {t} was useless.",
        ),
        WEATHER,
        (
            "{N} tried glue, string and {food}, but nothing held.",
            "{He} went to {a_lw} {in_q}, who thought about it for an hour.",
            "{N} worked on it {manner} for {num} evenings.",
            "{M} took the {t} apart, and then there were {num} pieces on the floor.",
        ),
        HELPER,
        (
            "With {a_lo} and a lot of patience the {t} was whole again.",
            "The missing piece was in the beak of {a_lx}!",
            "In the end {N} used a part of {his} own {o2}, and it fitted.",
            "It looked a little different now, but {N} liked the {t} even more.",
        ),
        END_OBJECT,
    ),
    "gift": (
        (
            "{When}, {N} wanted to give {M} a present, and it had to be {a_t}.",
            "The birthday of {M} was near, and {N} had seen {a_lt} {in_p}.",
            "{N} had nothing but {num} coins, but the {t} in the window {in_p} cost more.",
            "\"What does {M} wish for?\" asked {N}. \"{A_lt},\" said the {w}.",
        ),
        (
            "So {N} sold {food} {in_q} for {num} days.",
            "{He} helped the {w} with {a_lo} and was paid in coins.",
            "{N} tried to make one from {a_lo} and {food}, which was a mess.",
            "{He} swapped {his} {o} with {a_lx} and got {a_lo} for it, but not the {t}.",
        ),
        WEATHER,
        HELPER,
        (
            "On the day itself {N} wrapped the {t} in {fine} paper.",
            "{M} opened the parcel {manner} and hugged the {t}.",
            "When {M} saw the {t}, there was a {sound}: {M} had dropped {a_lo}, {his} present for {N}.",
            "\"Now I know what the noise was,\" laughed {M}, and tried the {t} at once.",
        ),
        END_OBJECT,
    ),
    "quarrel": (
        FIND_OBJECT,
        (
            "{M} wanted the {t} as well, and both pulled at it.",
            "\"The {t} is mine!\" said {N}. \"But I saw it first,\" said {M} {manner}.",
            "The {w} claimed that the {t} belonged to the {q}.",
            "{A_lx} came and swore that the {t} had been stolen from its nest.",
        ),
        (
            "They did not speak for {num} days, and the {t} lay {in_q} alone.",
            "They asked {a_lw}, who said: \"Cut it in half.\"",
            "In their anger they dropped the {t} into the well.",
            "Everybody {in_p} took a side, and the {food} got cold.",
        ),
        NIGHT,
        (
            "Then {N} had an idea: on even days the {t} was for {M}, on odd days for {him}.",
            "\"What is {a_t} without a friend?\" thought {N}, and {moved} to {M}.",
            "Both said sorry at the same moment, and even the {x} had to laugh.",
            "\"Keep it,\" said {M}. \"No, you keep it,\" said {N}, and so it went on for an hour.",
        ),
        END_OBJECT,
    ),
    "owner": (
        FIND_OBJECT,
        (
            "On the {t} was a name, but nobody could read it.",
            "\"Somebody misses this {t},\" thought {N}.",
            "Inside the {t} was a note: \"Please bring me back to the {q}.\"",
            "{N} wanted to keep the {t}, yet {he} was {low} about it.",
        ),
        SEARCH,
        (
            "{N} hung {num} notices on the trees {in_q}.",
            "{A_lx} knew {a_lw} who had cried over {a_t}.",
            "{He} showed the {t} to every {w}, and each told another tale.",
        ),
        WEATHER,
        (
            "It belonged to {a_lw}, who had lost it {num} years before.",
            "{M} turned pale: \"That is the {t} of my grandmother!\"",
            "\"Keep it,\" said the {w}, \"for you have walked far enough.\"",
            "The {w} was so glad that {N} got {food} for a whole week.",
        ),
        END_OBJECT,
    ),
}

SIGHT_PLOTS = {
    "secret": (
        SEE_SIGHT,
        (
            "It was said that {a_lo} was hidden near the {t}.",
            "{M} had heard that the {t} could be opened with {a_lo}.",
            "Nobody had ever gone behind the {t}, since {a_lx} lived there.",
            "At noon the shadow of the {t} pointed to the {q}.",
        ),
        WEATHER,
        SEARCH,
        HELPER,
        (
            "Beside the {t} they found a box, and in it were {num} letters from {a_lw}.",
            "Then the ground gave way, and under the {t} was {a_fine} room full of {food}.",
            "The secret was small: {a_lx} had its nest there, with {num} eggs.",
            "There was no gold, but a picture of the {t} with the name of {N} on it.",
        ),
        END_SIGHT,
    ),
    "saved": (
        SEE_SIGHT,
        (
            "But the {w} wanted to take the {t} away and build a shop {in_p}.",
            "After the storm the {t} was in a bad way.",
            "Nobody cared for the {t}, and {a_lx} had made a hole in it.",
            "\"The {t} is old and {fine},\" said the {w}, \"so it must go.\"",
        ),
        (
            "{N} wrote {num} letters and sat down in front of the {t}.",
            "{M} fetched paint, {a_lo} and {food} for everyone.",
            "\"Then who will look after the {x}?\" asked {N} {manner}.",
            "All the children {in_q} joined hands around the {t}.",
        ),
        WEATHER,
        HELPER,
        (
            "The {w} said nothing for a while, but then picked up {a_lo} and helped.",
            "In {month} the {t} was more beautiful than ever.",
            "When the work was done, there was a {sound}, and {num} birds flew up from the {t}.",
        ),
        END_SIGHT,
    ),
    "dare": (
        SEE_SIGHT,
        (
            "\"You are too {low} to go near the {t} at night,\" said {M}.",
            "{N} wanted to be the first to touch the {t} in winter.",
            "{M} had bet {num} biscuits that {N} would not sleep beside the {t}.",
            "Even the {w} had always been afraid of the {t}, and {N} wanted to know why.",
        ),
        NIGHT,
        (
            "So {N} {moved} there with {a_lo} and a bag of {food}.",
            "Step by step {he} came closer, and {his} heart beat {manner}.",
            "It was {weather}, and the {t} seemed twice as large.",
            "Halfway there something made a {sound}: it was {a_lx}.",
        ),
        (
            "\"Good evening,\" said {a_lw}, who sat there and ate {food}.",
            "From up close the {t} was not frightening, only {fine}.",
            "{M} had followed in secret, since friends do not leave each other alone.",
            "{N} touched it once, twice, and laughed out loud.",
        ),
        END_SIGHT,
    ),
    "wish": (
        SEE_SIGHT,
        (
            "The {t} was {low}, for it could not leave its place.",
            "\"What do you see all day, old {t}?\" asked {N}.",
            "{N} told the {t} all {his} worries, even the one about the {o}.",
            "Whoever thinks of a friend beside the {t}, it was said, will meet one.",
        ),
        WEATHER,
        (
            "{When2}, {a_lx} came and brought news from the {q}.",
            "{N} brought the {t} {a_lo}, and the next day {food} lay in its place.",
            "Then {a_lw} came by with {a_lo} and asked for the way to the {q}.",
            "A child called {M} stood on the other side and was {low2} too.",
        ),
        HELPER,
        (
            "And so the {t} saw more of the world than many who travel.",
            "\"You see,\" said the {w}, \"it does listen.\"",
            "{N} and {M} built a bench there out of {a_lo}.",
        ),
        END_SIGHT,
    ),
}
