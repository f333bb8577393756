"""Public word lists: names that key a canary, and words that secrets of kind `words` are made of."""

# ruff: noqa: SIM905  # a block of words reads better than a column of strings

GIVEN_NAMES = tuple(
    """
    Ada Alan Alma Amara Anton Asta Bela Bruno Carla Cato Chiara Clara Dario Dina Edda Egon Elia Emil Enzo Erik Esther
    Fabio Filip Freja Gaia Greta Hana Hugo Ida Igor Ilse Ines Ivan Jana Joel Juno Karim Katja Klaus Laila Lars Lena Leon
    Lina Luca Magda Malik Marta Mila Nadia Nils Nora Olga Omar Oscar Petra Rafi Rosa Saga Selma Simon Tara Theo Vera
    """.split()
)

FAMILY_NAMES = tuple(
    """
    Abel Adler Alves Amari Anker Aydin Bauer Becker Berg Bianchi Blom Bose Brandt Bruun Castro Conti Cruz Dahl Daly Diaz
    Dumas Eklund Engel Falk Faria Ferro Fisker Fonseca Gallo Garner Grant Gruber Haas Hansen Hoff Holm Ibsen Jensen Kahn
    Keller Khan Klein Kovac Lange Lund Marsh Mehta Meyer Moreau Moretti Nagy Novak Okoro Olsen Patel Quist Reyes Rossi
    Sato Silva Storm Tanaka Vogel Winter
    """.split()
)

WORDS = tuple(
    """
    acid acorn actor album alley amber anchor angel ankle apple apron arrow atlas attic autumn bacon badge baker bamboo
    banjo barn basil basin beach beard beetle bell berry bishop blade blanket blossom boat bonnet border bottle bowl
    branch brass bread brick bridge bronze brook broom brush bucket buffalo button cabin cable cactus camel camera canal
    candle canoe canyon carbon carpet carrot castle cedar cellar chain chalk chapel cherry chess chimney circle citrus
    clay cliff clock cloud clover coal cobalt coconut coffee copper coral cork corn cotton cradle crane crayon cricket
    crown crystal curtain dagger daisy desert diamond dolphin donkey dragon drum eagle earth easel echo elbow ember
    engine fabric falcon feather fern fiddle field finger flame flute forest fossil fountain fox garden garlic ginger
    glacier globe goat granite grape gravel guitar hammer harbor harvest hazel helmet heron hill hinge honey horn island
    ivory jacket jade jasmine jungle kettle kiwi ladder lagoon lantern laurel lava leather lemon lentil lily linen lion
    lizard lobster locket lotus magnet mango maple marble meadow melon mirror mitten monkey moss mountain mushroom
    needle nest nickel nutmeg oak oasis ocean olive onion opal orange orchid organ otter owl oyster paddle palace panda
    paper parrot pasture peach pearl pebble pepper piano pigeon pillow pine planet plum pocket pollen pond poppy prism
    pumpkin puzzle quarry quartz rabbit raven ribbon river robin rocket rose ruby saddle saffron sail salmon sand satin
    scarf shadow shell silver
    """.split()
)
